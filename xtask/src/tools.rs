//! What the tests need beside Rust: a C compiler (SQLite is compiled in), the `sqlite3` shell (to read
//! the files as any other program would), and where it can be had a server that speaks S3.

use std::process::{Command, Stdio};

use crate::run::Failed;

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

/// Installs what is missing where that is possible without asking (as root, with `apt-get`), and
/// says what to install otherwise.
pub(crate) fn install() -> Result<(), Failed> {
    let missing = || TOOLS.iter().filter(|tool| !works(tool.program, tool.probe));
    let packages: Vec<&str> = missing().map(|tool| tool.package).collect();
    if packages.is_empty() {
        return Ok(());
    }
    if is_root() && works("apt-get", "--version") {
        println!("> apt-get install {}", packages.join(" "));
        succeed(Command::new("apt-get").arg("update"))?;
        let install = ["install", "--yes", "--no-install-recommends"];
        succeed(
            Command::new("apt-get")
                .env("DEBIAN_FRONTEND", "noninteractive")
                .args(install)
                .args(&packages),
        )?;
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

/// Installs the servers of the tests where that is possible without asking. Without one its tests say so
/// and are skipped, or fail where `EVERBUS_REQUIRE_SERVERS=1` asks for it.
pub(crate) fn install_servers() {
    if works("moto_server", "--help") {
        return;
    }
    if is_root() && works("python3", "-mpip") {
        println!("> pip install moto[server]");
        let install = ["-m", "pip", "install", "--quiet", "moto[server]"];
        // Whether it worked is seen below.
        let _ = Command::new("python3").args(install).status();
    }
    if !works("moto_server", "--help") {
        println!(
            "moto_server is missing: the tests of overflow to S3 are skipped (pip install 'moto[server]')"
        );
    }
}

fn works(program: &str, probe: &str) -> bool {
    Command::new(program)
        .arg(probe)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

fn is_root() -> bool {
    Command::new("id")
        .arg("-u")
        .output()
        .is_ok_and(|output| output.stdout.trim_ascii() == b"0")
}

fn succeed(command: &mut Command) -> Result<(), Failed> {
    let shown = format!("{command:?}");
    match command.status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(Failed::new(format!("{shown} failed ({status})"))),
        Err(e) => Err(Failed::new(format!("cannot run {shown}: {e}"))),
    }
}
