//! `everbus-chaos`: kills a real process and cuts its power, again and again, and checks for lost events.
//! Exit code 1 means that something was lost or that a check failed.

#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a program that talks to the person who runs it"
)]

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use clap::{Args, Parser, Subcommand};
use everbus_testkit::chaos::campaign::{Campaign, Until};
use everbus_testkit::chaos::disk::Disk;
use everbus_testkit::chaos::hostile::{self, Hostile};
use everbus_testkit::chaos::power::{Losses, Power, Unsynced};
use everbus_testkit::chaos::relay::{self, RelayCampaign};
use everbus_testkit::chaos::retain::{self, Bug, Policy};
use everbus_testkit::chaos::tally::Tally;
use everbus_testkit::chaos::{Broken, victim, zombie};

#[derive(Parser)]
#[command(about, args_conflicts_with_subcommands = true)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    campaign: CampaignArgs,
}

#[derive(Args)]
struct CampaignArgs {
    /// Run for this many seconds (default: 60).
    #[arg(long, group = "until")]
    seconds: Option<u64>,
    /// Run for this many minutes.
    #[arg(long, group = "until")]
    minutes: Option<u64>,
    /// Run until this many processes were killed.
    #[arg(long, group = "until")]
    kills: Option<u64>,
    /// How often the power is cut afterwards. By default a fifth of the time goes to it if the machine allows
    /// it, and none with --kills.
    #[arg(long, value_name = "K")]
    power_losses: Option<u64>,
    /// How often each kind of hostile condition is tried afterwards.
    #[arg(long, value_name = "K", default_value_t = HOSTILE_ROUNDS)]
    hostile_rounds: u64,
    /// Repeats the schedule of an earlier run.
    #[arg(long)]
    seed: Option<u64>,
}

/// They take a few seconds in all.
const HOSTILE_ROUNDS: u64 = 3;

#[derive(Subcommand)]
enum Command {
    /// Cut the power of a disk while a process works on it.
    Power {
        /// How often.
        #[arg(long, default_value_t = 20)]
        losses: u64,
        /// The control: without syncs, the same procedure must lose something.
        #[arg(long)]
        normal: bool,
        /// The other control: without syncs of objects, the same procedure must lose some.
        #[arg(long, conflicts_with = "normal")]
        unsynced_objects: bool,
        /// Repeats the schedule of an earlier run.
        #[arg(long)]
        seed: Option<u64>,
    },
    /// Kill the relay of an outbox.
    Relay {
        /// How often.
        #[arg(long, default_value_t = 100)]
        kills: u64,
        /// Repeats the schedule of an earlier run.
        #[arg(long)]
        seed: Option<u64>,
    },
    /// Hostile conditions: files that many processes create at once, flipped bits, deleted files, bad rows,
    /// clocks that jump, few file descriptors.
    Hostile {
        /// How often each is tried.
        #[arg(long, default_value_t = HOSTILE_ROUNDS)]
        rounds: u64,
        /// Repeats the choices of an earlier run.
        #[arg(long)]
        seed: Option<u64>,
    },
    #[command(hide = true)]
    Starter {
        #[arg(long)]
        db: PathBuf,
        #[arg(long)]
        publishes: u64,
    },
    #[command(hide = true)]
    RelayVictim {
        #[arg(long)]
        outbox: Option<PathBuf>,
        #[arg(long)]
        db: PathBuf,
        #[arg(long)]
        keep_on: bool,
        #[arg(long)]
        mark_first: bool,
    },
    #[command(hide = true)]
    RetainVictim {
        #[arg(long)]
        db: PathBuf,
        #[arg(long)]
        policy: String,
        #[arg(long)]
        bug: Option<String>,
    },
    #[command(hide = true)]
    Victim {
        #[arg(long)]
        db: PathBuf,
        #[arg(long)]
        seed: u64,
        #[arg(long)]
        publishes: u64,
        #[arg(long)]
        repeat: Option<u64>,
        #[arg(long)]
        lease_ms: Option<u64>,
        #[arg(long)]
        normal: bool,
        #[arg(long)]
        ack_first: bool,
        #[arg(long)]
        overflow: bool,
        #[arg(long)]
        die_between: Option<u64>,
        #[arg(long)]
        late_objects: bool,
        #[arg(long)]
        unsynced_objects: bool,
        #[arg(long)]
        mortal: bool,
    },
    #[command(hide = true)]
    Zombie {
        #[arg(long)]
        db: PathBuf,
    },
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let outcome = match cli.command {
        None => campaign(&cli.campaign),
        Some(Command::Power {
            losses,
            normal,
            unsynced_objects,
            seed,
        }) => {
            let control = match (normal, unsynced_objects) {
                (true, _) => Some(Unsynced::Commits),
                (_, true) => Some(Unsynced::Objects),
                _ => None,
            };
            power(losses, control, seed_or_new(seed))
        }
        Some(Command::Victim {
            db,
            seed,
            publishes,
            repeat,
            lease_ms,
            normal,
            ack_first,
            overflow,
            die_between,
            late_objects,
            unsynced_objects,
            mortal,
        }) => victim::run(victim::Orders {
            repeat,
            lease_ms,
            normal,
            ack_first,
            overflow,
            die_between,
            late_objects,
            unsynced_objects,
            mortal,
            ..victim::Orders::new(db, seed, publishes)
        })
        .map(|()| true),
        Some(Command::Hostile { rounds, seed }) => hostile(rounds, seed_or_new(seed)),
        Some(Command::Starter { db, publishes }) => hostile::start(&db, publishes).map(|()| true),
        Some(Command::Relay { kills, seed }) => relays(kills, seed_or_new(seed)),
        Some(Command::RelayVictim {
            outbox,
            db,
            keep_on,
            mark_first,
        }) => relay::run(&relay::Orders {
            db,
            outbox,
            keep_on,
            mark_first,
        })
        .map(|()| true),
        Some(Command::RetainVictim { db, policy, bug }) => {
            retention(db, &policy, bug.as_deref()).map(|()| true)
        }
        Some(Command::Zombie { db }) => zombie::run(&db).map(|()| true),
    };
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(broken) => {
            eprintln!("everbus-chaos: {broken}");
            ExitCode::FAILURE
        }
    }
}

fn campaign(args: &CampaignArgs) -> Result<bool, Broken> {
    let seed = seed_or_new(args.seed);
    println!("seed={seed}");
    let seconds = args.minutes.map(|m| m.saturating_mul(60)).or(args.seconds);
    let time = Duration::from_secs(seconds.unwrap_or(60));
    let (until, losses) = match (args.kills, args.power_losses) {
        (Some(kills), losses) => (Until::Kills(kills), Losses::Count(losses.unwrap_or(0))),
        (None, Some(losses)) => (Until::Time(time), Losses::Count(losses)),
        (None, None) => (Until::Time(time * 4 / 5), Losses::Time(time / 5)),
    };
    let directory = new_directory("everbus-chaos-")?;
    let io = |error| Broken(format!("{}: {error}", directory.display()));
    let campaign = Campaign {
        program: this_program()?,
        directory: directory.clone(),
        seed,
        until,
    };
    let mut tally = campaign.run()?;
    if tally.is_clean() {
        std::fs::remove_dir_all(&directory).map_err(io)?;
    }
    let mut control = true;
    if !matches!(losses, Losses::Count(0)) && tally.is_clean() && may_lose_power() {
        let power = Power {
            program: this_program()?,
            seed,
        };
        tally.add(power.run(losses)?);
        control = lost_as_it_must(&power, Unsynced::Commits)?;
    }
    let surroundings = hostile(args.hostile_rounds, seed)?;
    Ok(report(&tally, seed) && control && surroundings)
}

fn power(losses: u64, control: Option<Unsynced>, seed: u64) -> Result<bool, Broken> {
    println!("seed={seed}");
    if !may_lose_power() {
        return Ok(true);
    }
    let power = Power {
        program: this_program()?,
        seed,
    };
    if let Some(unsynced) = control {
        return lost_as_it_must(&power, unsynced);
    }
    Ok(report(&power.run(Losses::Count(losses))?, seed))
}

fn hostile(rounds: u64, seed: u64) -> Result<bool, Broken> {
    in_directory("everbus-hostile-", seed, |program, directory| {
        let hostile = Hostile {
            program,
            directory,
            seed,
            rounds,
        };
        let found = hostile.run()?;
        Ok((found.to_string(), found.problems))
    })
}

fn relays(kills: u64, seed: u64) -> Result<bool, Broken> {
    in_directory("everbus-relay-", seed, |program, directory| {
        let campaign = RelayCampaign {
            program,
            directory,
            seed,
            kills,
        };
        let found = campaign.run()?;
        Ok((found.to_string(), found.problems))
    })
}

/// Runs a campaign in a new directory and prints what it found. The directory stays if there are problems.
fn in_directory(
    prefix: &str,
    seed: u64,
    run: impl FnOnce(PathBuf, PathBuf) -> Result<(String, Vec<String>), Broken>,
) -> Result<bool, Broken> {
    println!("seed={seed}");
    let directory = new_directory(prefix)?;
    let (found, problems) = run(this_program()?, directory.clone())?;
    for problem in &problems {
        println!("PROBLEM {problem}");
    }
    println!("{found} seed={seed}");
    if problems.is_empty() {
        std::fs::remove_dir_all(&directory)
            .map_err(|error| Broken(format!("{}: {error}", directory.display())))?;
    }
    Ok(problems.is_empty())
}

fn retention(db: PathBuf, policy: &str, bug: Option<&str>) -> Result<(), Broken> {
    let unknown = |what: &str| Broken(format!("there is no {what:?}"));
    let policy = Policy::named(policy).ok_or_else(|| unknown(policy))?;
    let bug = bug
        .map(|name| Bug::named(name).ok_or_else(|| unknown(name)))
        .transpose()?;
    retain::run(&retain::Orders { db, policy, bug })
}

/// Whether the machine can cut the power of a disk; prints a warning if not.
fn may_lose_power() -> bool {
    match Disk::missing() {
        None => true,
        Some(what) => {
            println!("SKIPPED power loss: {what} is missing");
            false
        }
    }
}

fn lost_as_it_must(power: &Power, unsynced: Unsynced) -> Result<bool, Broken> {
    let Tally {
        outages,
        events,
        lost,
        ..
    } = &power.control(unsynced)?;
    let what = match unsynced {
        Unsynced::Commits => "synchronous=NORMAL",
        Unsynced::Objects => "unsynced objects",
    };
    println!("control: {what} outages={outages} events={events} lost={lost}");
    if *lost == 0 {
        println!("the control lost nothing: the power losses prove nothing on this machine");
    }
    Ok(*lost > 0)
}

fn report(tally: &Tally, seed: u64) -> bool {
    for problem in &tally.problems {
        println!("PROBLEM {problem}");
    }
    println!("{} checks, {} orderly ends", tally.checks, tally.orderly);
    println!(
        "kills of relays {}, of processes that split events {}, of retention jobs {}",
        tally.relay_kills, tally.overflow_kills, tally.retention_kills
    );
    println!(
        "{} rows relayed, {} objects looked at and {} collected, {} events removed",
        tally.relayed, tally.objects, tally.collected, tally.removed
    );
    if tally.outages > 0 {
        println!(
            "{} acknowledgements heard after the power began to go are not counted; {} of them are gone",
            tally.last_words, tally.unheard
        );
    }
    println!("{}", tally.line(seed));
    tally.is_clean()
}

/// A new directory: files of an earlier run must not be taken for those of this one. It stays if there is
/// something to examine.
fn new_directory(prefix: &str) -> Result<PathBuf, Broken> {
    let made = tempfile::Builder::new().prefix(prefix).tempdir();
    made.map(tempfile::TempDir::keep)
        .map_err(|error| Broken(format!("making a directory: {error}")))
}

fn this_program() -> Result<PathBuf, Broken> {
    std::env::current_exe().map_err(|error| Broken(format!("where am I? {error}")))
}

fn seed_or_new(seed: Option<u64>) -> u64 {
    seed.unwrap_or_else(|| {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        now.map_or(1, |now| now.as_micros() as u64)
    })
}
