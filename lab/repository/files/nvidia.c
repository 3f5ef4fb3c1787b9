// SPDX-License-Identifier: MIT
/*
 * A STAND-IN of gpuwright's lab for NVIDIA's kernel module: it drives nothing. It is a real module, built by the real dkms against real
 * headers and loaded by a real kernel, and shows of itself what the driver shows: its version and the options it was loaded with.
 */
#include <linux/module.h>
#include <linux/proc_fs.h>
#include <linux/seq_file.h>

#ifdef GPUWRIGHT_LAB_FAULT_BUILD
#error "gpuwright lab: this package was made not to build"
#endif

static int NVreg_EnableMSI = 1;
module_param(NVreg_EnableMSI, int, 0444);
static char *NVreg_RegistryDwords = "";
module_param(NVreg_RegistryDwords, charp, 0444);
static char *NVreg_CoherentGPUMemoryMode = "";
module_param(NVreg_CoherentGPUMemoryMode, charp, 0444);

static struct proc_dir_entry *folder;

static int show_version(struct seq_file *file, void *data)
{
	seq_puts(file, "NVRM version: NVIDIA UNIX Open Kernel Module for @MACHINE@  @VERSION@  Release Build  (a stand-in of the gpuwright lab)\n");
	seq_puts(file, "GCC version:\n");
	return 0;
}

static int show_params(struct seq_file *file, void *data)
{
	seq_printf(file, "EnableMSI: %d\n", NVreg_EnableMSI);
	seq_printf(file, "CoherentGPUMemoryMode: \"%s\"\n", NVreg_CoherentGPUMemoryMode);
	seq_printf(file, "RegistryDwords: \"%s\"\n", NVreg_RegistryDwords);
	return 0;
}

static int __init start(void)
{
#ifdef GPUWRIGHT_LAB_FAULT_PROBE
	pr_err("NVRM: No NVIDIA devices probed.\n");
	return -ENODEV;
#endif
	folder = proc_mkdir("driver/nvidia", NULL);
	if (!folder)
		return -ENOMEM;
	if (!proc_create_single("version", 0444, folder, show_version) ||
	    !proc_create_single("params", 0444, folder, show_params)) {
		proc_remove(folder);
		return -ENOMEM;
	}
	return 0;
}

static void __exit stop(void)
{
	proc_remove(folder);
}

module_init(start);
module_exit(stop);
MODULE_LICENSE("Dual MIT/GPL");
MODULE_VERSION("@VERSION@");
MODULE_DESCRIPTION("STAND-IN of gpuwright's lab, drives nothing");
