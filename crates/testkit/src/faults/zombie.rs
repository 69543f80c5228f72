//! A process that is stopped past its lease and then acks.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::Child;
use std::time::Duration;

use everbus_core::{Event, Settlement, Verdict};
use rustix::process::Signal;

use super::worker::ZOMBIE;
use super::workers::command;
use super::{Place, Subject};
use crate::chaos::{process, zombie};

const PATIENCE: Duration = Duration::from_secs(120);

struct Zombie(Child);

impl Drop for Zombie {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A process fetches one event and is stopped past its lease, and this process takes the event over. Then the stopped
/// process continues and acks. Returns the result of its ack, `ACKED` or `REFUSED code`, and whether the ack of this
/// process, which holds the lease, was applied after it.
pub async fn late_ack(subject: &Subject, place: &Place) -> (String, bool) {
    let engine = (subject.open)(place.clone()).await.unwrap();
    let group = zombie::group().unwrap();
    engine.broker.declare(group.clone()).await.unwrap();
    let event = Event::builder("zombie.made").build().unwrap();
    engine.broker.append(vec![event]).await.unwrap();
    let child = command(subject, place).env(ZOMBIE, "1").spawn().unwrap();
    let mut zombie = Zombie(child);
    let output = BufReader::new(zombie.0.stdout.take().unwrap());
    let mut lines = output.lines().map_while(Result::ok);
    let mut hear = |words: [&str; 2]| {
        let said = |line: &String| words.iter().any(|word| line.contains(word));
        lines.find(said).expect("the process says what it does")
    };
    hear(["FETCHED", "REFUSED"]);
    process::stop(zombie.0.id()).unwrap();
    let mut options = zombie::options().unwrap();
    // This lease must outlast the rest of the test. Where the lease of a group is the longest that was asked for, the
    // event of the stopped process comes after this time.
    options.lease = PATIENCE / 4;
    let mut consumer = engine.broker.consume(group.name, options).await.unwrap();
    let fetched = tokio::time::timeout(PATIENCE, consumer.fetch(1)).await;
    let mut batch = fetched
        .expect("the lease of a stopped process ends")
        .unwrap();
    let delivery = batch.pop().unwrap();
    process::signal(zombie.0.id(), Signal::CONT).unwrap();
    writeln!(zombie.0.stdin.as_mut().unwrap(), "ack").unwrap();
    let said = hear(["ACKED", "REFUSED"]);
    let ack = Settlement::new(delivery.lease, Verdict::Ack);
    let answers = engine.broker.settle(vec![ack]).await.unwrap();
    let applied = answers.iter().all(Result::is_ok);
    drop(consumer);
    let _ = engine.broker.close().await;
    (said.trim().to_owned(), applied)
}
