//! A process that sleeps past its lease and then acks what is no longer its own.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

use everbus_core::{Consumer, Delivery, Engine, Event, EventState, Position, Settlement, Verdict};
use everbus_testkit::chaos::{process, zombie};
use rustix::process::Signal;

const PATIENCE: Duration = Duration::from_secs(60);

/// A process that holds one delivery.
struct Zombie {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl Zombie {
    fn spawn(file: &std::path::Path) -> Self {
        let mut child = Command::new(crate::program())
            .arg("zombie")
            .arg("--db")
            .arg(file)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Self { child, output }
    }

    fn hear(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line.trim().to_owned()
    }

    fn sleep(&self) {
        process::stop(self.child.id()).unwrap();
    }

    /// Wakes it up, has it ack, and returns what came of that.
    fn wake_and_ack(&mut self) -> String {
        process::signal(self.child.id(), Signal::CONT).unwrap();
        writeln!(self.child.stdin.as_mut().unwrap(), "ack").unwrap();
        self.hear()
    }
}

impl Drop for Zombie {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

async fn state(engine: &Engine) -> (EventState, u32) {
    let states = engine
        .lookup()
        .unwrap()
        .states(Position::seq(1))
        .await
        .unwrap();
    (states[0].state, states[0].attempts)
}

/// One event, fetched by a zombie that sleeps past its lease, and taken over by this process.
async fn taken_over(
    directory: &tempfile::TempDir,
) -> (Zombie, Engine, Box<dyn Consumer>, Delivery) {
    let file = directory.path().join("zombie.db");
    let engine = everbus_sqlite::open(&file, everbus_sqlite::Options::default()).unwrap();
    engine
        .broker
        .declare(zombie::group().unwrap())
        .await
        .unwrap();
    let event = Event::builder("zombie.made").build().unwrap();
    engine.broker.append(vec![event]).await.unwrap();
    let mut zombie = Zombie::spawn(&file);
    assert_eq!(zombie.hear(), "FETCHED 1 1");
    zombie.sleep();
    let mut options = zombie::options().unwrap();
    // Its own lease must outlast the test.
    options.lease = PATIENCE;
    let group = zombie::group().unwrap().name;
    let mut consumer = engine.broker.consume(group, options).await.unwrap();
    let mut batch = tokio::time::timeout(PATIENCE, consumer.fetch(1))
        .await
        .expect("the lease of a process that sleeps ends")
        .unwrap();
    let delivery = batch.pop().unwrap();
    // One more if it was so long until the zombie slept that its own engine had noticed.
    assert!(delivery.attempt >= 2, "the zombie's attempt counts");
    (zombie, engine, consumer, delivery)
}

// conformance: fault-7: a zombie's late ack does not complete the lease that another process holds
// conformance: rule-4: a settlement with a lease that was lost is not applied, also across processes
#[tokio::test]
async fn a_late_ack_does_not_end_another_process_lease() {
    let directory = tempfile::tempdir().unwrap();
    let (mut zombie, engine, _consumer, delivery) = taken_over(&directory).await;
    assert_eq!(zombie.wake_and_ack(), "REFUSED LeaseLost");
    let held = (EventState::Processing, delivery.attempt);
    assert_eq!(state(&engine).await, held);
    let ack = Settlement::new(delivery.lease, Verdict::Ack);
    let answers = engine.broker.settle(vec![ack]).await.unwrap();
    assert!(answers[0].is_ok(), "{answers:?}");
    assert_eq!(state(&engine).await.0, EventState::Done);
}

// conformance: fault-7: a late ack of what another process gave up does not take the dead letter away
#[tokio::test]
async fn a_late_ack_does_not_undo_what_another_process_decided() {
    let directory = tempfile::tempdir().unwrap();
    let (mut zombie, engine, _consumer, delivery) = taken_over(&directory).await;
    let verdict = Verdict::Dead { failure: None };
    let answers = engine
        .broker
        .settle(vec![Settlement::new(delivery.lease, verdict)])
        .await
        .unwrap();
    assert!(answers[0].is_ok(), "{answers:?}");
    assert_eq!(zombie.wake_and_ack(), "REFUSED LeaseLost");
    assert_eq!(state(&engine).await.0, EventState::Dlq);
}
