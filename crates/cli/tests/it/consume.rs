//! `everbus consume`: the consumers of a configuration file, in several processes.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Child;

use rustix::process::{Pid, Signal, kill_process};

use crate::support::{Shop, signal, wait_until};

/// Each event adds a line with its id, its attempt and the process that ran the command.
const CONFIG: &str = r#"broker:
  type: sqlite
  url: sqlite:shop.db
consumers:
  mails:
    stream: order.placed
    group: mail-service
    concurrency: 1
    start_from: first
    exec:
      command: [sh, -c, 'echo "$EVERBUS_EVENT_ID $EVERBUS_ATTEMPT $PPID" >> handled; sleep 0.05']
  ours:
    stream: order.paid
"#;

fn shop() -> Shop {
    let shop = Shop::new();
    std::fs::write(shop.path("everbus.yaml"), CONFIG).unwrap();
    shop
}

/// The processes that are running; they are killed if the test fails.
struct Consuming(Child);

impl Consuming {
    fn start(shop: &Shop, more: &[&str]) -> Self {
        let words = [&["--config", "everbus.yaml", "consume"], more].concat();
        Self(shop.command(&words).spawn().unwrap())
    }

    /// Asks it to end, and returns its exit code.
    fn stop(mut self) -> Option<i32> {
        signal(&self.0, "-TERM");
        self.0.wait().unwrap().code()
    }
}

impl Drop for Consuming {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// By event: the process of each of its attempts.
fn handled(shop: &Shop) -> BTreeMap<String, Vec<i32>> {
    let text = std::fs::read_to_string(shop.path("handled")).unwrap_or_default();
    let mut handled: BTreeMap<String, Vec<i32>> = BTreeMap::new();
    for line in text.lines() {
        let mut words = line.split(' ');
        let (id, _attempt) = (words.next().unwrap(), words.next().unwrap());
        let process = words.next().unwrap().parse().unwrap();
        handled.entry(id.to_owned()).or_default().push(process);
    }
    handled
}

fn publish(shop: &Shop, count: &str) {
    shop.run(&[
        "--db",
        "shop.db",
        "publish",
        "order.placed",
        "--count",
        count,
    ])
    .ok();
}

/// How many events the file has.
fn published(shop: &Shop) -> usize {
    let tail = ["--db", "shop.db", "-o", "json", "tail", "--no-follow"];
    shop.run(&tail).lines().len()
}

// conformance: framework/scaling-workers: --workers starts so many processes of the consumers in a configuration file; they share a group, each event goes to one of them, and one that is killed is replaced
#[test]
fn several_processes_share_a_group() {
    let shop = shop();
    let consuming = Consuming::start(&shop, &["--workers", "3"]);
    // More, until a second process has come.
    wait_until("two processes work", || {
        publish(&shop, "20");
        let seen = handled(&shop);
        let processes: BTreeSet<&i32> = seen.values().flatten().collect();
        processes.len() > 1
    });
    let count = published(&shop);
    wait_until("all are handled", || handled(&shop).len() == count);
    let first = handled(&shop);
    assert!(first.values().all(|runs| runs.len() == 1), "{first:?}");
    let processes: BTreeSet<i32> = first.values().flatten().copied().collect();
    // A process dies in the middle of its work; the others and its successor do the rest.
    publish(&shop, "60");
    wait_until("they have begun", || handled(&shop).len() > count + 10);
    let victim = Pid::from_raw(*processes.first().unwrap()).unwrap();
    kill_process(victim, Signal::KILL).unwrap();
    wait_until("all are handled", || handled(&shop).len() == count + 60);
    wait_until("the group has settled everything", || {
        let groups = shop
            .run(&["--db", "shop.db", "-o", "json", "groups"])
            .json();
        let open = |name: &str| groups[0][name].as_u64().unwrap();
        open("behind") + open("in_flight") + open("waiting") == 0
    });
    let all = handled(&shop);
    let victim = victim.as_raw_nonzero().get();
    let again = all.values().filter(|runs| runs.len() > 1);
    for runs in again {
        assert!(
            runs.contains(&victim),
            "only what it held comes again: {all:?}"
        );
    }
    assert_eq!(consuming.stop(), Some(0));
}

// conformance: engines/consume-bad-input: everbus consume without a file, with an unknown consumer or with one that has no handler is refused with a hint, and starts nothing
#[test]
fn what_cannot_be_consumed_is_refused() {
    let shop = shop();
    std::fs::write(
        shop.path("none.yaml"),
        "broker: {url: 'sqlite:shop.db'}\nconsumers: {ours: {stream: order.paid}}\n",
    )
    .unwrap();
    for (words, said) in [
        (&["consume"][..], "there is no configuration file"),
        (
            &["--config", "everbus.yaml", "consume", "mail"],
            "its consumers are mails, ours",
        ),
        (
            &["--config", "everbus.yaml", "consume", "mails", "ours"],
            "\"ours\" has no command and no webhook",
        ),
        (
            &["--config", "none.yaml", "consume", "--workers", "2"],
            "no consumer of the file has a command or a webhook",
        ),
        (
            &["--config", "everbus.yaml", "consume", "--workers", "0"],
            "--workers",
        ),
    ] {
        let ran = shop.run(words);
        assert_eq!(ran.code, 2, "{words:?}: {ran:?}");
        assert!(ran.err.contains(said), "{words:?}: {ran:?}");
    }
    assert!(!shop.path("shop.db").exists());
}
