# nothing here yet
