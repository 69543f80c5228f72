//! A process that fetches one event and settles it only when told, so that it can be stopped past its lease.
//!
//! It prints `FETCHED position attempt`, waits for a line on standard input, acks, and prints `ACKED` or
//! `REFUSED code`.

use std::io::{BufRead as _, Write as _};
use std::path::Path;
use std::time::Duration;

use everbus_core::{
    ConsumeOptions, Engine, Error, GroupName, GroupSpec, Pattern, Settlement, StartFrom,
    SubscriptionSpec, Verdict,
};

use super::Broken;

/// The lease of the zombie, short enough for a test to outlive.
pub const LEASE: Duration = Duration::from_millis(300);

/// The group it consumes.
pub fn group() -> Result<GroupSpec, Error> {
    Ok(GroupSpec {
        name: GroupName::new("zombie")?,
        start_from: StartFrom::First,
        ordered: false,
        ephemeral: false,
        subscriptions: vec![SubscriptionSpec {
            name: "all".into(),
            pattern: Pattern::new(">")?,
        }],
    })
}

/// How it consumes.
pub fn options() -> Result<ConsumeOptions, Error> {
    Ok(ConsumeOptions::new(vec![Pattern::new(">")?]).lease(LEASE))
}

/// Fetches, waits to be told, acks.
pub fn run(file: &Path) -> Result<(), Broken> {
    tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build()
        .map_err(Broken::at("starting a runtime"))?
        .block_on(async {
            let options = everbus_sqlite::Options::default();
            fetch_and_ack(everbus_sqlite::open(file, options)?).await
        })
        .map_err(|error| Broken(format!("{error:?}")))
}

pub(crate) async fn fetch_and_ack(engine: Engine) -> Result<(), Error> {
    engine.broker.declare(group()?).await?;
    let mut consumer = engine.broker.consume(group()?.name, options()?).await?;
    let batch = consumer.fetch(1).await?;
    for delivery in batch {
        let (position, attempt) = (delivery.record.position, delivery.attempt);
        tell(&format!("FETCHED {position} {attempt}"));
        let _ = std::io::stdin().lock().read_line(&mut String::new());
        let ack = Settlement::new(delivery.lease, Verdict::Ack);
        for answer in engine.broker.settle(vec![ack]).await? {
            match answer {
                Ok(()) => tell("ACKED"),
                Err(error) => tell(&format!("REFUSED {}", error.code())),
            }
        }
    }
    engine.broker.close().await
}

fn tell(line: &str) {
    let _ = writeln!(std::io::stdout(), "{line}");
}
