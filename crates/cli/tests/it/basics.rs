//! What holds for every command: help, errors, exit codes, where the file is.

use serde_json::Value;

use crate::support::{Shop, exists};

// conformance: bus/cli-no-arguments: without arguments a newcomer is told what to type next
#[test]
fn without_arguments_a_newcomer_is_told_what_to_type() {
    let shop = Shop::new();
    let text = shop.run(&[]).ok();
    assert!(text.contains("everbus demo") && text.contains("everbus publish"));
    assert!(text.lines().count() < 10, "{text}");
    assert!(!exists(&shop.db()), "saying hello creates nothing");
}

// conformance: memory/cli-help: the help of a command shows its own options first, those of every command apart, and lines that fill the width
#[test]
fn the_help_of_a_command_begins_with_its_own_options() {
    let shop = Shop::new();
    for command in [
        &["replay"][..],
        &["events"],
        &["dlq", "edit"],
        &["dlq", "list"],
        &["audit", "verify"],
        &["outbox", "relay"],
        &["retention", "run"],
        &["check"],
    ] {
        let help = shop.run(&[command, &["--help"]].concat()).ok();
        let (own, everywhere) = help.split_once("Options of every command:").unwrap();
        for option in ["--db <", "--actor <NAME>  ", "--busy-timeout"] {
            assert!(!own.contains(option), "{command:?} {option}: {help}");
        }
        assert!(everywhere.contains("--db <FILE>"), "{help}");
        // A text that is broken twice leaves a word or two alone on a line.
        let (_, text) = everywhere.split_once("(-v, -vv, -vvv)").unwrap();
        for paragraph in text.split("\n\n") {
            let lines: Vec<&str> = paragraph.trim().lines().collect();
            for line in lines.iter().take(lines.len().saturating_sub(1)) {
                assert!(line.len() > 60, "{line:?} in {help}");
            }
        }
    }
}

// conformance: bus/cli-exit-codes: the exit codes are in the help
#[test]
fn the_help_documents_the_exit_codes() {
    let text = Shop::new().run(&["--help"]).ok();
    for code in ["0  ", "1  ", "2  ", "3  ", "4  ", "130"] {
        assert!(text.contains(&format!("\n  {code}")), "{code} in {text}");
    }
}

#[test]
fn what_cannot_be_understood_is_usage_and_creates_nothing() {
    let shop = Shop::new();
    for wrong in [
        &["frobnicate"][..],
        &["publish"],
        &["publish", "a.b", "{}", "--count", "0"],
        &["publish", "a.b", "{}", "--rate", "-1"],
        &["publish", "a.b", "{}", "--meta", "novalue"],
        &["publish", "a.b", "{}", "--entity", "noid"],
        &["publish", "a.b", "{}", "--count", "2", "--id", "x"],
        &["tail", "a.*b"],
        &["tail", "--from", "yesterday"],
        &["--max-payload", "0", "publish", "a.b"],
        &["--busy-timeout", "-1", "groups"],
        &["dlq", "purge"],
        &["dlq", "purge", "--older-than", "-1"],
        &["dlq", "list", "--after", "nonsense"],
        &["bench", "no-such-scenario"],
        &["--db", "a.db", "--broker", "sqlite:b.db", "groups"],
        &["completions", "tcsh-of-old"],
    ] {
        let ran = shop.run(wrong);
        assert_eq!(ran.code, 2, "{wrong:?} {ran:?}");
        assert!(!ran.err.is_empty(), "{wrong:?}");
    }
    assert!(!exists(&shop.db()));
}

// conformance: bus/cli-json: errors are JSON on standard error with -o json
#[test]
fn errors_are_json_when_json_was_asked_for() {
    let shop = Shop::new();
    for (arguments, exit, code) in [
        (&["-o", "json", "groups"][..], 3, "NoSuchFile"),
        (&["publish", "bad*type", "-o", "json"], 2, "InvalidType"),
        (&["frobnicate", "--output=json"], 2, "Usage"),
        (&["-o", "json", "dlq", "purge"], 2, "Usage"),
    ] {
        let ran = shop.run(arguments);
        assert_eq!(ran.code, exit, "{ran:?}");
        let error: Value =
            serde_json::from_str(&ran.err).unwrap_or_else(|e| panic!("{e}: {ran:?}"));
        assert_eq!(error["error"]["code"], code);
        assert!(error["error"]["message"].as_str().unwrap().len() > 5);
    }
}

#[test]
fn what_is_wrong_with_a_value_comes_with_its_hint() {
    let shop = Shop::new();
    for arguments in [&["tail", "us*"][..], &["dlq", "list", "--type", "a.**.b"]] {
        let text = shop.run(arguments);
        assert!(text.err.contains("\nhint: use whole segments"), "{text:?}");
        let ran = shop.run(&[&["-o", "json"], arguments].concat());
        let error: Value = serde_json::from_str(&ran.err).unwrap();
        let hint = error["error"]["hint"].as_str().unwrap();
        assert!(hint.starts_with("use whole segments"), "{hint}");
        assert!(!error["error"]["message"].as_str().unwrap().contains("hint"));
    }
    let help = shop.run(&["publish", "--help"]).ok();
    assert!(help.contains("--wait=5"), "{help}");
}

// conformance: bus/cli-no-creation: commands that read do not create a missing file
#[test]
fn commands_that_read_do_not_create_a_missing_file() {
    let shop = Shop::new();
    for arguments in [
        &["tail", "--no-follow"][..],
        &["tail", "--group", "g", "--no-follow"],
        &["get", "0198c5f0-0000-7000-8000-000000000000"],
        &["dlq", "list"],
        &["dlq", "show", "x"],
        &["dlq", "retry", "--all"],
        &["dlq", "purge", "--older-than", "1"],
        &["groups"],
        &["groups", "remove", "g", "--yes"],
        &["check"],
        &["backup", "copy.db"],
    ] {
        let said = shop.run(arguments).failed(3, "NoSuchFile");
        assert!(said.contains("hint: "), "{said}");
    }
    assert_eq!(std::fs::read_dir(shop.path(".")).unwrap().count(), 0);
}

#[test]
fn a_flag_beats_the_environment_and_the_environment_the_default() {
    let shop = Shop::new();
    let mut named = shop.command(&["publish", "a.b"]);
    named.env("EVERBUS_DB", "env.db");
    assert!(named.output().unwrap().status.success());
    assert!(exists(&shop.path("env.db")) && !exists(&shop.db()));
    let mut flagged = shop.command(&["--db", "flag.db", "publish", "a.b"]);
    flagged.env("EVERBUS_BROKER", "sqlite:other.db");
    assert!(flagged.output().unwrap().status.success());
    assert!(exists(&shop.path("flag.db")) && !exists(&shop.path("other.db")));
    let mut both = shop.command(&["groups"]);
    both.env("EVERBUS_DB", "a")
        .env("EVERBUS_BROKER", "sqlite:b");
    assert_eq!(both.output().unwrap().status.code(), Some(2));
}

// conformance: bus/open-url: sqlite: names a file, and what is not known is refused
#[test]
fn a_broker_is_named_by_a_url() {
    let shop = Shop::new();
    shop.run(&["--broker", "sqlite:url.db", "publish", "a.b"])
        .ok();
    assert!(exists(&shop.path("url.db")));
    for url in ["rabbitmq://localhost", "memory:", "sqlite:"] {
        shop.run(&["--broker", url, "publish", "a.b"])
            .failed(2, "InvalidUrl");
    }
}

// conformance: bus/not-a-file: a directory where a file should be is refused with its own error
#[test]
fn a_directory_where_a_file_should_be_is_refused() {
    let shop = Shop::new();
    std::fs::create_dir(shop.path("dir")).unwrap();
    for command in [&["publish", "a.b"][..], &["groups"]] {
        let arguments = [&["--db", "dir"], command].concat();
        let said = shop.run(&arguments).failed(2, "NotAFile");
        assert!(said.contains("dir/everbus.db"), "{said}");
    }
    let said = shop.run(&["--db", "new/", "publish", "a.b"]);
    said.failed(2, "NotAFile");
    assert!(!exists(&shop.path("new")));
}

// conformance: bus/cli-completions: completions prints a script for each shell
#[test]
fn completions_are_printed_for_every_shell() {
    let shop = Shop::new();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = shop.run(&["completions", shell]).ok();
        assert!(
            script.contains("everbus") && script.contains("dlq"),
            "{shell}"
        );
    }
}
