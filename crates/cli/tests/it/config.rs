//! `everbus check --config`, and the broker that a configuration file names.

use serde_json::{Value, json};

use crate::support::{Shop, exists};

const WRONG: &str = "\
broker:
  type: reddis
consumers:
  mail:
    stream: orders:order-placed
    criticalty: standard
    processing_timeout: 30 parsecs
";

fn write(shop: &Shop, name: &str, text: &str) {
    std::fs::write(shop.path(name), text).unwrap();
}

// conformance: handlers/config-check: check --config reports every problem with its line and an exit code
#[test]
fn every_problem_of_a_configuration_is_reported_with_its_line() {
    let shop = Shop::new();
    write(&shop, "everbus.yaml", WRONG);
    let ran = shop.run(&["check", "--config", "everbus.yaml"]);
    assert_eq!(ran.code, 1, "{ran:?}");
    let lines: Vec<&str> = ran.out.lines().collect();
    assert_eq!(lines.len(), 4, "{ran:?}");
    assert!(lines[0].starts_with("BAD everbus.yaml:2:9: "), "{ran:?}");
    assert!(
        lines[1].starts_with("BAD everbus.yaml:6:5: unknown key \"criticalty\"")
            && lines[1].ends_with("did you mean \"criticality\"?"),
        "{ran:?}"
    );
    assert!(
        lines[2].starts_with("BAD everbus.yaml:7:25: ") && lines[2].contains("ms, s, m and h"),
        "{ran:?}"
    );
    assert_eq!(lines[3], "3 problems in everbus.yaml");
    assert_eq!(ran.err, "");

    let ran = shop.run(&["-o", "json", "check", "--config", "everbus.yaml"]);
    assert_eq!(ran.code, 1, "{ran:?}");
    let report: Value = serde_json::from_str(&ran.out).unwrap();
    assert_eq!(report["ok"], false);
    assert_eq!(report["total"], 3);
    assert_eq!(report["problems"][1]["line"], 6);
    assert_eq!(report["problems"][1]["column"], 5);
    let hint = report["problems"][1]["hint"].as_str().unwrap();
    assert!(hint.contains("criticality"), "{hint}");
    assert!(!exists(&shop.db()), "a check creates nothing");
}

// conformance: handlers/config-check: a missing, empty or binary file is a problem too
#[test]
fn what_is_no_configuration_does_not_pass() {
    let shop = Shop::new();
    write(&shop, "empty.yaml", "");
    std::fs::write(shop.path("binary.yaml"), b"\x7fELF\0\xff").unwrap();
    let huge = std::fs::File::create(shop.path("huge.yaml")).unwrap();
    huge.set_len(50 << 20).unwrap();
    for (file, said) in [
        ("missing.yaml", "there is no such file"),
        ("empty.yaml", "the file is empty"),
        ("binary.yaml", "not a text"),
        ("huge.yaml", "larger than 1 MiB"),
    ] {
        let ran = shop.run(&["check", "--config", file]);
        assert_eq!(ran.code, 1, "{ran:?}");
        assert!(ran.out.contains(said), "{ran:?}");
        assert!(ran.out.starts_with(&format!("BAD {file}")), "{ran:?}");
        let said = shop.run(&["--config", file, "groups"]);
        said.failed(2, "InvalidConfig");
    }
}

// conformance: handlers/config-check: a good file passes; an engine that this build lacks is a warning
#[test]
fn a_good_configuration_passes_and_a_missing_engine_is_a_warning() {
    let shop = Shop::new();
    write(
        &shop,
        "kafka.yaml",
        "broker:\n  type: kafka\n  url: ${KAFKA_URL}\n",
    );
    let check = |format: &str| {
        let mut command = shop.command(&["-o", format, "check", "--config", "kafka.yaml"]);
        command.env("KAFKA_URL", "kafka://me:hunter2@cache:9092");
        crate::support::Ran::from(command.output().unwrap())
    };
    let text = check("text").ok();
    assert!(
        text.contains("broker kafka://***@cache:9092, 0 consumers"),
        "{text}"
    );
    let missing = !cfg!(feature = "kafka");
    assert_eq!(
        text.contains("warning: this build has no engine for kafka"),
        missing,
        "{text}"
    );
    let report = check("json").json();
    assert_eq!(report["ok"], true);
    assert_eq!(
        report["broker"],
        json!({ "type": "kafka", "url": "kafka://***@cache:9092" })
    );
    let warnings = report["warnings"].as_array().map_or(0, Vec::len);
    assert_eq!(warnings, usize::from(missing), "{report}");
    // Without the variable it does not pass, and says which one it is.
    let mut command = shop.command(&["check", "--config", "kafka.yaml"]);
    let ran = crate::support::Ran::from(command.env_remove("KAFKA_URL").output().unwrap());
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(
        ran.out
            .contains("kafka.yaml:3:8: broker.url: the variable KAFKA_URL is not set")
    );

    write(&shop, "file.yaml", "broker: {url: 'sqlite:shop.db'}\n");
    let text = shop.run(&["--config", "file.yaml", "check"]).ok();
    assert!(
        text.ends_with("file.yaml: everything is as it should be\n"),
        "{text}"
    );
    assert!(!exists(&shop.path("shop.db")));
    let both = shop.run(&["check", "--config", "file.yaml", "--db", "shop.db"]);
    assert_eq!(both.code, 2, "{both:?}");
}

// conformance: handlers/config-broker: --config and EVERBUS_CONFIG choose the engine unless something else does
#[test]
fn the_broker_of_the_configuration_is_used_unless_another_is_named() {
    let shop = Shop::new();
    write(&shop, "a.yaml", "broker: {type: sqlite, url: a.db}\n");
    write(&shop, "b.yaml", "broker: {type: sqlite, url: b.db}\n");
    write(&shop, "none.yaml", "streams: {default_maxlen: 5}\n");
    let publish = |arguments: &[&str], variables: &[(&str, &str)]| {
        let arguments = [arguments, &["publish", "a.b"]].concat();
        let mut command = shop.command(&arguments);
        command.envs(variables.iter().copied());
        assert!(command.output().unwrap().status.success(), "{arguments:?}");
    };
    let used = |name: &str| {
        let was = exists(&shop.path(name));
        let _ = std::fs::remove_file(shop.path(name));
        was
    };
    publish(&["--config", "a.yaml"], &[]);
    assert!(used("a.db"));
    publish(&[], &[("EVERBUS_CONFIG", "a.yaml")]);
    assert!(used("a.db"));
    publish(
        &["--config", "b.yaml"],
        &[("EVERBUS_CONFIG", "a.yaml"), ("EVERBUS_DB", "c.db")],
    );
    assert!(used("b.db") && !used("a.db") && !used("c.db"));
    publish(&[], &[("EVERBUS_CONFIG", "a.yaml"), ("EVERBUS_DB", "c.db")]);
    assert!(used("c.db") && !used("a.db"));
    publish(&["--config", "a.yaml", "--db", "d.db"], &[]);
    assert!(used("d.db") && !used("a.db"));
    publish(&["--config", "a.yaml", "--broker", "sqlite:e.db"], &[]);
    assert!(used("e.db") && !used("a.db"));
    publish(&["--config", "none.yaml"], &[("EVERBUS_CONFIG", "a.yaml")]);
    assert!(used("everbus.db") && !used("a.db"));
}

// conformance: handlers/config-credentials: credentials of a configured broker are sent to that broker, and to no other one that an option names
#[cfg(feature = "redis")]
#[test]
fn credentials_go_to_their_own_broker_only() {
    use std::io::Read as _;
    let shop = Shop::new();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let here = format!("redis://{}", listener.local_addr().unwrap());
    for (configured, is_sent) in [(here.as_str(), true), ("redis://127.0.0.1:1", false)] {
        let text = format!("broker: {{url: '{configured}', user: app, password: hunter2}}\n");
        write(&shop, "prod.yaml", &text);
        let options = ["--config", "prod.yaml", "--broker", &here, "groups"];
        let mut child = shop.command(&options).spawn().unwrap();
        let (mut stream, _) = listener.accept().unwrap();
        let mut buffer = [0; 4096];
        let n = stream.read(&mut buffer).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        let sent = String::from_utf8_lossy(&buffer[..n]).into_owned();
        assert!(!sent.is_empty());
        assert_eq!(sent.contains("hunter2"), is_sent, "{sent}");
    }
}

// conformance: handlers/config-broker: a broker that this build has no engine for, or a file that is wrong, is a clear error
#[test]
fn a_configuration_that_cannot_be_used_is_a_clear_error() {
    let shop = Shop::new();
    write(
        &shop,
        "kafka.yaml",
        "broker: {url: 'kafka://me:hunter2@cache'}\n",
    );
    if !cfg!(feature = "kafka") {
        let said = shop.run(&["--config", "kafka.yaml", "groups"]);
        assert!(!said.err.contains("hunter2"), "{said:?}");
        let said = said.failed(2, "InvalidUrl");
        assert!(said.contains("kafka.yaml names a kafka broker"), "{said}");
    }
    write(&shop, "memory.yaml", "broker: {type: memory}\n");
    shop.run(&["--config", "memory.yaml", "publish", "a.b"])
        .failed(2, "InvalidUrl");

    write(&shop, "wrong.yaml", WRONG);
    let said = shop.run(&["--config", "wrong.yaml", "publish", "a.b"]);
    let said = said.failed(2, "InvalidConfig");
    assert!(said.starts_with("error[InvalidConfig]: 3 problems in wrong.yaml\n  wrong.yaml:2:9: "));
    assert_eq!(said.lines().count(), 5, "{said}");
    let ran = shop.run(&[
        "-o",
        "json",
        "--config",
        "wrong.yaml",
        "--db",
        "x.db",
        "publish",
        "a.b",
    ]);
    assert_eq!(ran.code, 2, "{ran:?}");
    let error: Value = serde_json::from_str(&ran.err).unwrap();
    assert_eq!(error["error"]["code"], "InvalidConfig");
    assert_eq!(error["error"]["problems"][2]["line"], 7);
    assert_eq!(
        std::fs::read_dir(shop.path(".")).unwrap().count(),
        3,
        "nothing was created"
    );
    // What needs no engine does not care.
    let mut welcome = shop.command(&[]);
    welcome.env("EVERBUS_CONFIG", "wrong.yaml");
    assert!(welcome.output().unwrap().status.success());
}

#[test]
fn the_help_names_the_option_and_its_variable() {
    let shop = Shop::new();
    let help = shop.run(&["--help"]).ok();
    assert!(
        help.contains("--config <FILE>") && help.contains("EVERBUS_CONFIG"),
        "{help}"
    );
    let help = shop.run(&["check", "--help"]).ok();
    assert!(
        help.contains("everbus check --config everbus.yaml"),
        "{help}"
    );
}

// conformance: handlers/config-publish: publishing from the command line keeps to the limits of the file
#[test]
fn what_is_published_keeps_to_the_limits_of_the_file() {
    let shop = Shop::new();
    let file = "broker: {type: sqlite, url: 'sqlite:everbus.db'}\n\
                streams: {default_maxlen: 2, on_full: reject}\n";
    write(&shop, "everbus.yaml", file);
    let publish = ["--config", "everbus.yaml", "publish", "order.placed", "1"];
    assert_eq!(shop.run(&publish).code, 0);
    // A group that reads from the first event on owes it, and handles nothing more after that.
    let tail = ["tail", "--group", "audit", "--from", "first", "--no-follow"];
    assert_eq!(shop.run(&tail).code, 0);
    for _ in 0..2 {
        assert_eq!(shop.run(&publish).code, 0);
    }
    let ran = shop.run(&publish);
    assert_ne!(ran.code, 0, "{ran:?}");
    assert!(ran.err.contains("Backpressure"), "{ran:?}");
}

// conformance: framework/broker-default: without a broker the events are in a file here; with `type: redis`, as in the file of the specification, they are on Redis
#[test]
fn without_a_broker_there_is_a_file() {
    let shop = Shop::new();
    write(
        &shop,
        "plain.yaml",
        "consumers: {mails: {stream: order.placed}}\n",
    );
    let publish = |config| ["--config", config, "publish", "order.placed"];
    shop.run(&publish("plain.yaml")).ok();
    assert!(shop.db().is_file());
    if cfg!(feature = "redis") {
        let text = "broker:\n  type: redis\n  url: ${REDIS_URL}\n";
        write(&shop, "redis.yaml", text);
        let mut command = shop.command(&publish("redis.yaml"));
        // No server listens on this port.
        command.env("REDIS_URL", "redis://127.0.0.1:1");
        let ran = crate::support::Ran::from(command.output().unwrap());
        assert!(ran.failed(4, "Unavailable").contains("127.0.0.1:1"));
    }
}
