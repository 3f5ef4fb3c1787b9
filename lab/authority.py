"""The lab's own certificate authority: what a site's internal CA would be."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lab.command import run
from lab.network import Segment
from lab.paths import locked, make_private, state

_DAYS = "3650"


@dataclass(frozen=True)
class Certificate:
    """Two PEM files."""

    chain: Path
    key: Path


def ca_file() -> Path:
    """The authority's certificate, made if it is not there. Hosts trust it only where they are told to."""
    certificate = state() / "ca.crt"
    with locked(make_private(state()) / "ca.lock"):
        if not certificate.exists():
            run(
                [
                    *[
                        "openssl",
                        "req",
                        "-x509",
                        "-newkey",
                        "ec",
                        "-pkeyopt",
                        "ec_paramgen_curve:P-256",
                        "-nodes",
                        "-sha256",
                    ],
                    *[
                        "-days",
                        _DAYS,
                        "-subj",
                        "/CN=gpuwright lab CA",
                        "-addext",
                        "keyUsage=critical,keyCertSign,cRLSign",
                    ],
                    *["-keyout", str(state() / "ca.key"), "-out", str(certificate)],
                ]
            )
            (state() / "ca.key").chmod(0o600)
    return certificate


def issue(name: str, segment: Segment) -> Certificate:
    """A server certificate for ``name`` and the bridge's address; made once."""
    ca = ca_file()
    folder = make_private(state() / "certificates")
    made = Certificate(folder / f"{name}-{segment.number}.crt", folder / f"{name}-{segment.number}.key")
    with locked(state() / "ca.lock"):
        if made.chain.exists() and made.chain.stat().st_mtime >= ca.stat().st_mtime:
            return made
        request, extensions = folder / f"{name}.csr", folder / f"{name}.ext"
        run(
            [
                *[
                    "openssl",
                    "req",
                    "-new",
                    "-newkey",
                    "ec",
                    "-pkeyopt",
                    "ec_paramgen_curve:P-256",
                    "-nodes",
                    "-sha256",
                ],
                *["-subj", f"/CN={name}", "-keyout", str(made.key), "-out", str(request)],
            ]
        )
        made.key.chmod(0o600)
        extensions.write_text(
            f"basicConstraints=critical,CA:FALSE\nextendedKeyUsage=serverAuth\n"
            f"subjectAltName=DNS:{name},IP:{segment.gateway}\n"
        )
        run(
            [
                *["openssl", "x509", "-req", "-in", str(request), "-CA", str(ca), "-CAkey", str(state() / "ca.key")],
                *["-CAcreateserial", "-sha256", "-days", _DAYS, "-extfile", str(extensions), "-out", str(made.chain)],
            ]
        )
        request.unlink()
        extensions.unlink()
    return made
