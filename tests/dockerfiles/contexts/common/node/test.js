if (require("local")(2) !== 4) process.exit(1);
