//! Runs cargo and other programs from the root of the workspace and reports what failed.

use std::fmt;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

/// Why a task failed.
#[derive(Debug)]
pub(crate) struct Failed {
    what: String,
    usage: bool,
}

impl Failed {
    pub(crate) fn new(what: impl Into<String>) -> Self {
        Self {
            what: what.into(),
            usage: false,
        }
    }

    pub(crate) fn usage(what: impl Into<String>) -> Self {
        Self {
            what: what.into(),
            usage: true,
        }
    }

    pub(crate) fn is_usage(&self) -> bool {
        self.usage
    }
}

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)
    }
}

/// One call of cargo, or of a program that it built.
pub(crate) struct Cargo {
    command: Command,
    shown: String,
}

impl Cargo {
    pub(crate) fn new(arguments: &[&str]) -> Self {
        // Cargo names itself in this variable when it runs xtask.
        let program = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let mut command = Command::new(program);
        command.args(arguments).current_dir(crate::root());
        Self {
            command,
            shown: format!("cargo {}", arguments.join(" ")),
        }
    }

    /// Another program, run and reported on in the same way.
    pub(crate) fn program(program: &Path, arguments: &[&str]) -> Self {
        let mut command = Command::new(program);
        command.args(arguments).current_dir(crate::root());
        let name = program.file_name().unwrap_or_default().to_string_lossy();
        Self {
            command,
            shown: format!("{name} {}", arguments.join(" ")),
        }
    }

    pub(crate) fn args(mut self, arguments: &[String]) -> Self {
        self.command.args(arguments);
        for argument in arguments {
            self.shown.push(' ');
            self.shown.push_str(argument);
        }
        self
    }

    pub(crate) fn env(mut self, name: &str, value: &str) -> Self {
        self.command.env(name, value);
        self.shown = format!("{name}={value} {}", self.shown);
        self
    }

    pub(crate) fn run(mut self) -> Result<(), Failed> {
        println!("> {}", self.shown);
        let status = self
            .command
            .status()
            .map_err(|e| Failed::new(format!("cannot run {}: {e}", self.shown)))?;
        if status.success() {
            Ok(())
        } else {
            Err(Failed::new(format!("{} failed ({status})", self.shown)))
        }
    }

    /// Runs it, passes its standard error on, and returns its standard output.
    pub(crate) fn output(mut self) -> Result<String, Failed> {
        println!("> {}", self.shown);
        let cannot = |e| Failed::new(format!("cannot run {}: {e}", self.shown));
        let ran = self.command.stderr(Stdio::inherit()).output();
        let ran = ran.map_err(cannot)?;
        if !ran.status.success() {
            let text = format!("{} failed ({})", self.shown, ran.status);
            return Err(Failed::new(text));
        }
        Ok(String::from_utf8_lossy(&ran.stdout).into_owned())
    }

    /// Runs tests, shows their output as it comes, and adds up the results of all test binaries.
    pub(crate) fn run_tests(mut self) -> Result<Summary, Failed> {
        println!("> {}", self.shown);
        let mut child = self
            .command
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|e| Failed::new(format!("cannot run {}: {e}", self.shown)))?;
        let mut summary = Summary::default();
        if let Some(output) = child.stdout.take() {
            for line in BufReader::new(output).split(b'\n').map_while(Result::ok) {
                let line = String::from_utf8_lossy(&line).into_owned();
                println!("{line}");
                summary.add(&line);
            }
        }
        let status = child
            .wait()
            .map_err(|e| Failed::new(format!("cannot wait for {}: {e}", self.shown)))?;
        if status.success() {
            Ok(summary)
        } else {
            Err(Failed::new(format!("{summary}; {} failed", self.shown)))
        }
    }
}

/// The output of another program, run from the root of the workspace.
pub(crate) fn output(program: &str, arguments: &[&str]) -> Result<String, Failed> {
    Cargo::program(Path::new(program), arguments).output()
}

/// The results of all test binaries together.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Summary {
    binaries: u64,
    passed: u64,
    failed: u64,
    ignored: u64,
}

impl Summary {
    /// Reads a line such as `test result: ok. 3 passed; 0 failed; 0 ignored; …`.
    fn add(&mut self, line: &str) {
        let Some(result) = line.strip_prefix("test result: ") else {
            return;
        };
        self.binaries += 1;
        let counts = result.split_once(". ").map_or(result, |(_, counts)| counts);
        for part in counts.split(';') {
            let Some((n, what)) = part.trim().split_once(' ') else {
                continue;
            };
            let Ok(n) = n.parse::<u64>() else { continue };
            match what {
                "passed" => self.passed += n,
                "failed" => self.failed += n,
                "ignored" => self.ignored += n,
                _ => {}
            }
        }
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} passed, {} failed, {} ignored in {} test binaries",
            self.passed, self.failed, self.ignored, self.binaries
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_of_several_binaries_add_up() {
        let mut summary = Summary::default();
        summary.add("running 4 tests");
        summary.add("test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s");
        summary.add("test result: FAILED. 2 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s");
        assert_eq!(
            summary.to_string(),
            "5 passed, 1 failed, 1 ignored in 2 test binaries"
        );
    }
}
