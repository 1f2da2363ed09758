console.log(require("local")(2));
