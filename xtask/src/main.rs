//! Tasks of the workspace: `cargo xtask test | servers | conformance | compat | bench | instructions | chaos | rooms | ci`.
//!
//! Only the standard library, so that it builds in seconds on a fresh machine.

#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a task runner talks to the person who runs it"
)]

mod conformance;
mod instructions;
mod rooms;
mod run;
mod runner;
mod servers;
mod tools;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use run::{Cargo, Failed};

const USAGE: &str = "\
cargo xtask <task>

  test [--no-chaos]            install what the tests need (as root, with apt-get; otherwise say
                               what is missing and stop) and the servers they talk to (as root,
                               with apt-get and pip), then run all of them, check the conformance
                               table and run the kill campaign for 60 seconds
  servers                      install the servers that tests talk to, as root
  conformance [--check]        write docs/conformance.md from docs/requirements and the tags on the tests;
                               --check only says whether it is in order and up to date
  compat                       run the conformance suite on every engine, write its outcomes to
                               docs/compat and COMPAT.md, and say how long each engine took;
                               every run of the tests compares them
  bench [--record] [arguments] build in release mode and run `everbus bench` with the arguments;
                               --record writes the results to docs/requirements/benches.txt
  bench engines [arguments]    the engines with a server beside their raw clients
  bench bridge [arguments]     bridges between engines beside what their two ends do alone
  instructions                 count what an event costs in the pipeline, with valgrind
  chaos --minutes N            kill a real process again and again and look for lost events
        --seconds N            [--hostile-rounds K] how often hostile surroundings are tried
  rooms                        say whether the folders of a crate use each other in a circle
  ci                           format check, lints with warnings as errors, then test
";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (task, rest) = match arguments.split_first() {
        Some((task, rest)) => (task.as_str(), rest),
        None => ("help", &[][..]),
    };
    let outcome = match task {
        "test" => test(rest),
        "servers" => {
            servers::install();
            Ok(())
        }
        "conformance" => conformance_task(rest),
        "compat" => compat(rest),
        "bench" => bench(rest),
        "instructions" => instructions::count(&root()),
        "chaos" => chaos(rest),
        "rooms" => rooms::check(&root()),
        runner::TASK => runner::run(rest),
        "ci" => ci(rest),
        "help" | "-h" | "--help" => {
            print!("{USAGE}");
            Ok(())
        }
        other => Err(Failed::usage(format!("there is no task {other:?}"))),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(failed) => {
            eprintln!("xtask: {failed}");
            if failed.is_usage() {
                eprint!("\n{USAGE}");
                return ExitCode::from(2);
            }
            ExitCode::FAILURE
        }
    }
}

/// The root of the workspace: the parent of this package.
fn root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().unwrap_or(here).to_path_buf()
}

fn test(arguments: &[String]) -> Result<(), Failed> {
    let mut campaign = true;
    for argument in arguments {
        match argument.as_str() {
            "--no-chaos" => campaign = false,
            other => {
                return Err(Failed::usage(format!("test does not know {other:?}")));
            }
        }
    }
    tools::install()?;
    servers::install();
    let tests = ["test", "--workspace", "--all-features", "--no-fail-fast"];
    let setting = runner::setting().map(|setting| ["--config".to_owned(), setting]);
    let tests = Cargo::new(&tests)
        .args(setting.as_ref().map_or(&[][..], |setting| &setting[..]))
        .run_tests();
    let table = conformance::check(&root());
    let chaos = if campaign && tests.is_ok() {
        chaos_after_tests(60)
    } else {
        Ok(())
    };
    // All three run before the first failure is reported, so that one run shows everything.
    match &tests {
        Ok(summary) => println!("\nsummary: {summary}"),
        Err(failed) => println!("\nsummary: {failed}"),
    }
    tests.map(drop).and(table).and(chaos)
}

fn conformance_task(arguments: &[String]) -> Result<(), Failed> {
    match arguments {
        [] => conformance::write(&root()),
        [flag] if flag == "--check" => conformance::check(&root()),
        _ => Err(Failed::usage("conformance takes --check or nothing")),
    }
}

/// Runs the suite on every engine with `EVERBUS_WRITE_COMPAT`, then renders `COMPAT.md` in the test kit.
fn compat(arguments: &[String]) -> Result<(), Failed> {
    if !arguments.is_empty() {
        return Err(Failed::usage("compat takes nothing"));
    }
    let engines = [
        "test",
        "--package",
        "everbus-memory",
        "--package",
        "everbus-sqlite",
        "--package",
        "everbus-postgres",
        "--package",
        "everbus-nats",
        "--package",
        "everbus-kafka",
        "--package",
        "everbus-redis",
        "--package",
        "everbus-testkit",
        "--all-features",
        "--test",
        "it",
    ];
    let table = ["test", "--package", "everbus-testkit", "--lib", "compat"];
    let write = |cargo: Cargo| cargo.env("EVERBUS_WRITE_COMPAT", "1").run();
    // Runs only the module in which the suite is expanded.
    write(Cargo::new(&engines).args(&["conformance::".to_owned()]))?;
    write(Cargo::new(&table))
}

fn bench(arguments: &[String]) -> Result<(), Failed> {
    if let Some((first, rest)) = arguments.split_first()
        && first == "--record"
    {
        return record(rest);
    }
    if let Some((first, rest)) = arguments.split_first()
        && ["engines", "bridge"].contains(&first.as_str())
    {
        return bench_servers(first, rest);
    }
    everbus_bench(arguments).run()
}

/// Every engine with a server beside its raw client, or bridges between them.
fn bench_servers(what: &str, arguments: &[String]) -> Result<(), Failed> {
    servers::install();
    let program = format!("everbus-bench-{what}");
    let fixed = [
        "run",
        "--release",
        "--package",
        "everbus-bench",
        "--features",
        "engines",
        "--bin",
        &program,
        "--",
    ];
    Cargo::new(&fixed).args(arguments).run()
}

/// Runs the benchmarks and records their results, with the commit.
fn record(arguments: &[String]) -> Result<(), Failed> {
    if arguments.iter().any(|a| a == "--quick" || a == "--events") {
        return Err(Failed::usage("a run of another size is not recorded"));
    }
    let path = root().join(conformance::RESULTS);
    let stored = std::fs::read_to_string(&path).unwrap_or_default();
    let mut results = conformance::Results::parse(&stored).map_err(Failed::new)?;
    let commit = run::output("git", &["rev-parse", "--short", "HEAD"])?;
    let changed = run::output("git", &["status", "--porcelain"])?;
    let commit = match changed.trim() {
        "" => commit.trim().to_owned(),
        _ => format!("{} with changes", commit.trim()),
    };
    let json = ["-o".to_owned(), "json".to_owned()];
    let printed = everbus_bench(&json).args(arguments).output()?;
    let recorded = results.record(&printed, &commit).map_err(Failed::new)?;
    std::fs::write(&path, results.render())
        .map_err(|e| Failed::new(format!("cannot write {}: {e}", path.display())))?;
    println!("{printed}recorded: {}", recorded.join(", "));
    conformance::write(&root())
}

fn everbus_bench(arguments: &[String]) -> Cargo {
    let fixed = [
        "run",
        "--release",
        "--package",
        "everbus-cli",
        "--bin",
        "everbus",
        "--",
        "bench",
    ];
    Cargo::new(&fixed).args(arguments)
}

fn chaos(arguments: &[String]) -> Result<(), Failed> {
    let number = |text: &String| {
        text.parse::<u64>()
            .map_err(|_| Failed::usage(format!("{text:?} is not a number")))
    };
    let usage = "chaos takes --minutes N or --seconds N, and then perhaps --hostile-rounds K";
    let [unit, n, more @ ..] = arguments else {
        return Err(Failed::usage(usage));
    };
    let seconds = match unit.as_str() {
        "--minutes" => number(n)?.saturating_mul(60),
        "--seconds" => number(n)?,
        _ => return Err(Failed::usage(usage)),
    };
    match more {
        [] => {}
        [option, rounds] if option == "--hostile-rounds" => drop(number(rounds)?),
        _ => return Err(Failed::usage(usage)),
    }
    chaos_for(seconds, more)
}

/// Runs the campaign with the program that the tests have just built: building it by itself would compile
/// all dependencies a second time, with other features.
fn chaos_after_tests(seconds: u64) -> Result<(), Failed> {
    let program = std::env::current_exe().map(|xtask| xtask.with_file_name("everbus-chaos"));
    match program {
        Ok(program) if program.exists() => {
            Cargo::program(&program, &["--seconds", &seconds.to_string()]).run()
        }
        _ => chaos_for(seconds, &[]),
    }
}

fn chaos_for(seconds: u64, more: &[String]) -> Result<(), Failed> {
    let fixed = [
        "run",
        "--package",
        "everbus-testkit",
        "--bin",
        "everbus-chaos",
        "--",
        "--seconds",
    ];
    Cargo::new(&fixed)
        .args(&[seconds.to_string()])
        .args(more)
        .run()
}

fn ci(arguments: &[String]) -> Result<(), Failed> {
    Cargo::new(&["fmt", "--all", "--check"]).run()?;
    let lint = [
        "clippy",
        "--workspace",
        "--all-features",
        "--all-targets",
        "--",
        "--deny",
        "warnings",
    ];
    Cargo::new(&lint).run()?;
    rooms::check(&root())?;
    let smallest = [
        "clippy",
        "--package",
        "everbus",
        "--no-default-features",
        "--",
        "--deny",
        "warnings",
    ];
    Cargo::new(&smallest).run()?;
    test(arguments)
}
