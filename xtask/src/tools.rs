//! Tools that the tests need beside Rust: a C compiler (SQLite is compiled in), and the `sqlite3` shell
//! (to read the files as another program would).

use std::process::{Command, Stdio};
use std::time::Duration;

use crate::run::Failed;

/// How often a download is tried.
const TRIES: u32 = 4;
/// Pause before the second try; it doubles before each further one.
pub(crate) const PAUSE: Duration = Duration::from_secs(3);

struct Tool {
    program: &'static str,
    /// An argument with which it succeeds and does nothing.
    probe: &'static str,
    package: &'static str,
    why: &'static str,
}

const TOOLS: &[Tool] = &[
    Tool {
        program: "cc",
        probe: "--version",
        package: "build-essential",
        why: "a C compiler, for the SQLite that is compiled in",
    },
    Tool {
        program: "sqlite3",
        probe: "--version",
        package: "sqlite3",
        why: "the SQLite shell, to read files as any other program would",
    },
];

/// Installs missing tools if that needs no password (as root, with `apt-get`); otherwise prints what to install.
pub(crate) fn install() -> Result<(), Failed> {
    let missing = || TOOLS.iter().filter(|tool| !works(tool.program, tool.probe));
    let packages: Vec<&str> = missing().map(|tool| tool.package).collect();
    if packages.is_empty() {
        return Ok(());
    }
    if is_root() && works("apt-get", "--version") {
        println!("> apt-get install {}", packages.join(" "));
        // A mirror may be slow or unreachable for a moment, and another program may hold the lock.
        repeatedly("installing packages", PAUSE, || {
            // If this fails, the existing package lists may be sufficient.
            let updated = succeed(apt_get().arg("update"));
            let install = ["install", "--yes", "--no-install-recommends"];
            succeed(apt_get().args(install).args(&packages)).map_err(|failed| match &updated {
                Ok(()) => failed,
                Err(before) => Failed::new(format!("{before}; {failed}")),
            })
        })
        // Missing tools are reported below, with what to do about them.
        .unwrap_or_else(|failed| println!("{failed}"));
    }
    let lines: Vec<String> = missing()
        .map(|tool| format!("  {}: {}", tool.program, tool.why))
        .collect();
    if lines.is_empty() {
        return Ok(());
    }
    Err(Failed::new(format!(
        "the tests need programs that are not installed:\n{}\n\
         On Debian or Ubuntu: sudo apt-get install {}\n\
         On Fedora: sudo dnf install gcc sqlite\n\
         On macOS: xcode-select --install (sqlite3 is there already)",
        lines.join("\n"),
        packages.join(" ")
    )))
}

/// `pip install`, without the name of the wheel.
pub(crate) fn pip_install() -> Command {
    let mut pip = Command::new("python3");
    pip.args(["-m", "pip", "install", "--quiet", "--no-input"])
        .args(["--retries", "5", "--timeout", "60"])
        // Without these variables, pip refuses to change the Python of the system, and warns when it runs as root. An
        // older pip ignores them.
        .env("PIP_BREAK_SYSTEM_PACKAGES", "1")
        .env("PIP_ROOT_USER_ACTION", "ignore");
    pip
}

pub(crate) fn apt_get() -> Command {
    let mut apt_get = Command::new("apt-get");
    apt_get.env("DEBIAN_FRONTEND", "noninteractive").args([
        "-o",
        "Acquire::Retries=3",
        "-o",
        "DPkg::Lock::Timeout=300",
    ]);
    apt_get
}

/// Repeats a failed action after a growing pause.
pub(crate) fn repeatedly(
    what: &str,
    mut pause: Duration,
    mut attempt: impl FnMut() -> Result<(), Failed>,
) -> Result<(), Failed> {
    for _ in 1..TRIES {
        let Err(failed) = attempt() else {
            return Ok(());
        };
        println!("{what}: {failed}; another try in {pause:?}");
        std::thread::sleep(pause);
        pause *= 2;
    }
    attempt().map_err(|failed| {
        let text = format!("{what} failed {TRIES} times; the last time: {failed}");
        Failed::new(text)
    })
}

pub(crate) fn works(program: &str, probe: &str) -> bool {
    Command::new(program)
        .arg(probe)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

pub(crate) fn is_root() -> bool {
    Command::new("id")
        .arg("-u")
        .output()
        .is_ok_and(|output| output.stdout.trim_ascii() == b"0")
}

pub(crate) fn succeed(command: &mut Command) -> Result<(), Failed> {
    let shown = format!("{command:?}");
    match command.status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(Failed::new(format!("{shown} failed ({status})"))),
        Err(e) => Err(Failed::new(format!("cannot run {shown}: {e}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_fails_is_tried_again_and_not_for_ever() {
        for (failures, expected) in [(0, 1), (2, 3), (TRIES - 1, TRIES), (99, TRIES)] {
            let mut tried = 0;
            let done = repeatedly("a test", Duration::ZERO, || {
                tried += 1;
                if tried > failures {
                    Ok(())
                } else {
                    Err(Failed::new("no answer"))
                }
            });
            assert_eq!((tried, done.is_ok()), (expected, failures < TRIES));
            if let Err(failed) = done {
                assert!(failed.to_string().ends_with("the last time: no answer"));
            }
        }
    }
}
