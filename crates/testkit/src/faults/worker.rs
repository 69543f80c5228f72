//! The worker process of a campaign: it handles, and reports on its standard output what it handled.
//!
//! A report is a line that begins with `@`: the test runner prints lines of its own. `@ H group id` is written
//! before the handler returns success, `@ S group id` before it skips, `@ L n` when the number of lost leases
//! has changed.

use std::time::Duration;

use everbus::{Bus, HandlerError, HandlerResult, Message, RetryPolicy};
use everbus_core::{Engine, Error};

use super::{GROUPS, LEASE, Place, Subject};
use crate::chaos::content::{Act, Content};
use crate::chaos::leases::ShortLeases;
use crate::chaos::victim::{end_of_input, tell};
use crate::chaos::{GROUPS as DESCRIBED, zombie};

pub(super) const URL: &str = "EVERBUS_FAULTS_URL";
pub(super) const FOLDER: &str = "EVERBUS_FAULTS_FOLDER";
pub(super) const ZOMBIE: &str = "EVERBUS_FAULTS_ZOMBIE";

/// Long enough for a starved process.
const TIMEOUT: Duration = Duration::from_secs(5);

pub(super) fn run(subject: Subject) {
    let (Ok(url), Some(folder)) = (std::env::var(URL), std::env::var_os(FOLDER)) else {
        return;
    };
    let place = Place {
        url,
        folder: folder.into(),
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap();
    let work = async {
        if std::env::var_os(ZOMBIE).is_some() {
            return zombie::fetch_and_ack(open(subject, &place).await?).await;
        }
        work(subject, &place).await
    };
    if let Err(error) = runtime.block_on(work) {
        tell(&format!("\n@ E {error:?}\n").replace("\n(", " ("));
        // The campaign must see that this worker gave up.
        std::process::exit(3);
    }
}

/// Opens the engine as soon as the server can be reached.
pub(super) async fn open(subject: Subject, place: &Place) -> Result<Engine, Error> {
    loop {
        match (subject.open)(place.clone()).await {
            Err(error) if error.class().may_repeat() => {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            outcome => return outcome,
        }
    }
}

async fn work(subject: Subject, place: &Place) -> Result<(), Error> {
    let mut engine = open(subject, place).await?;
    engine.broker = ShortLeases::wrap(engine.broker, LEASE);
    let policy = RetryPolicy::new()
        .base_delay(Duration::from_millis(5))
        .max_delay(Duration::from_millis(50));
    let builder = Bus::builder().retry(policy).timeout(TIMEOUT).prefetch(32);
    let bus = builder.with_engine(engine)?;
    for (n, group) in GROUPS.iter().enumerate() {
        // The server may go away at any time: the declaration is tried again.
        loop {
            let handler = move |message: Message| handle(message, n);
            let subscription = bus.subscribe(group.pattern).group(group.name);
            let subscription = subscription.name("worker").concurrency(8);
            match subscription.handler(handler).await {
                Err(error) if error.class().may_repeat() => {
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
                outcome => break outcome.map(drop)?,
            }
        }
    }
    while let Err(error) = bus.start().await {
        if !error.class().may_repeat() {
            return Err(error);
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    tell("\n@ READY\n");
    let ended = end_of_input();
    tokio::select! {
        error = watch(&bus) => return Err(error),
        _ = ended => {}
    }
    bus.shutdown_within(Duration::from_secs(20)).await.map(drop)
}

/// Reports lost leases; ends with an error if a group has stopped.
async fn watch(bus: &Bus) -> Error {
    let mut reported = 0;
    loop {
        tokio::time::sleep(Duration::from_millis(100)).await;
        let lost = bus.lost_leases();
        if lost != reported {
            tell(&format!("@ L {lost}\n"));
            reported = lost;
        }
        if let Some((_, error)) = bus.stopped_groups().into_iter().next() {
            return error;
        }
    }
}

async fn handle(message: Message, group: usize) -> HandlerResult {
    let (id, attempt) = (message.id(), message.attempt());
    let content = Content::of(id);
    if message.payload().as_ref() != content.payload {
        return Err(HandlerError::permanent("this is not what was published"));
    }
    let last = DESCRIBED[group].handlers.len() - 1;
    match content.act(group, last, attempt) {
        Act::Finish => {}
        Act::Nap(ms) => tokio::time::sleep(Duration::from_millis(ms)).await,
        Act::GiveUp => return Err(HandlerError::permanent("no retry can mend this")),
        Act::Fail | Act::Panic | Act::Oversleep => {
            return Err(HandlerError::new(format!("attempt {attempt} fails")));
        }
        Act::Skip => {
            tell(&format!("@ S {group} {id}\n"));
            return Err(HandlerError::skip("not for this group"));
        }
    }
    tell(&format!("@ H {group} {id}\n"));
    Ok(())
}
