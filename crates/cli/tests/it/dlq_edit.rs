//! `everbus dlq edit`.

use std::os::fd::AsFd as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::process::Stdio;

use everbus::{Bus, Event, HandlerError, RetryPolicy};
use serde_json::json;

use crate::support::{Ran, Shop, on_runtime};

/// An event that each of these groups gave up on, for each of these tenants.
fn buried(shop: &Shop, groups: &[&str], tenants: &[Option<&str>], payload: &str) -> String {
    let url = format!("sqlite:{}", shop.db().display());
    on_runtime(async {
        let builder = Bus::builder().retry(RetryPolicy::never());
        let bus = builder.open(&url).await.unwrap();
        for group in groups {
            let fail = || std::future::ready(Err::<(), _>(HandlerError::new("cannot")));
            bus.subscribe("order.placed")
                .group(*group)
                .handler(fail)
                .await
                .unwrap();
        }
        bus.start().await.unwrap();
        let id = everbus::EventId::new();
        for tenant in tenants {
            let mut event = Event::builder("order.placed")
                .id(id)
                .payload(payload.to_owned());
            if let Some(tenant) = tenant {
                event = event.tenant(*tenant);
            }
            bus.publish(event).await.unwrap().settled().await.unwrap();
        }
        bus.shutdown().await.unwrap();
        id.to_string()
    })
}

// conformance: memory/cli-dlq-edit: a corrected payload is sent to the group that failed; the original is kept, both linked
#[test]
fn a_dead_letter_is_sent_back_with_another_payload() {
    let shop = Shop::new();
    let id = buried(
        &shop,
        &["payment"],
        &[None],
        r#"{"amount":"ten","note":"\u001b[31m"}"#,
    );
    let dry = shop
        .run(&[
            "dlq",
            "edit",
            &id,
            "--payload",
            r#"{"amount":10}"#,
            "--dry-run",
        ])
        .ok();
    assert!(
        dry.contains("-   \"amount\": \"ten\"") && dry.contains("+   \"amount\": 10"),
        "{dry}"
    );
    assert!(dry.ends_with("would send it back to payment\n"), "{dry}");
    let amount = r#"{"amount":1.50}"#;
    let dry = ["-o", "json", "dlq", "edit", &id, "--dry-run", "--payload"];
    let dry = shop.run(&[&dry[..], &[amount]].concat());
    assert!(dry.out.contains("1.50"), "as it was written: {dry:?}");
    let dry = dry.json();
    assert_eq!(dry["original"]["amount"], "ten");
    assert_eq!(dry["payload"], json!({"amount": 1.5}));
    assert_eq!(dry["replaced_by"], json!(null));
    let sent = shop
        .run(&[
            "-o",
            "json",
            "dlq",
            "edit",
            &id,
            "--payload",
            r#"{"amount":10}"#,
        ])
        .json();
    assert_eq!(
        (&sent["id"], &sent["group"]),
        (&json!(id), &json!("payment"))
    );
    let new = sent["replaced_by"].as_str().unwrap();
    let letter = &shop.run(&["-o", "json", "dlq", "show", &id]).json()[0];
    assert_eq!(letter["replaced_by"], new);
    assert!(letter["retried_at"].is_string());
    assert_eq!(
        letter["event"]["payload"]["amount"], "ten",
        "the original is as it was"
    );
    let got = shop.run(&["-o", "json", "get", new]).json();
    assert_eq!(got["event"]["payload"], json!({"amount": 10}));
    assert_eq!(got["event"]["metadata"]["edit_of"], id.as_str());
    assert_eq!(got["groups"][0]["state"], "pending");
    let text = shop.run(&["dlq", "show", &id]).ok();
    assert!(text.contains(&format!("replaced by  {new}")), "{text}");
    let said = shop
        .run(&["dlq", "edit", &id, "--payload", "1"])
        .failed(3, "NotFound");
    assert!(said.contains("sent back to payment already"), "{said}");
}

// conformance: memory/cli-dlq-edit-from: the payload comes from the command line, standard input or a file
#[test]
fn the_payload_comes_from_standard_input_or_a_file() {
    let shop = Shop::new();
    let id = buried(&shop, &["payment"], &[None], "1");
    let arguments = ["dlq", "edit", &id, "--dry-run", "--payload"];
    let from_input = shop.run_with_input(&[&arguments[..], &["-"]].concat(), "{\"n\":\n 2}\n");
    assert!(from_input.ok().contains("+   \"n\": 2"));
    std::fs::write(shop.path("new.json"), "[3]\n").unwrap();
    let from_file = shop.run(&[&arguments[..], &["@new.json"]].concat()).ok();
    assert!(from_file.contains("+   3"), "{from_file}");
    let missing = shop.run(&[&arguments[..], &["@none.json"]].concat());
    let said = missing.failed(3, "NoSuchFile");
    assert!(said.contains("none.json"), "{said}");
    let small = ["--max-payload", "10"];
    let large = shop.run_with_input(&[&small[..], &arguments, &["-"]].concat(), &"1".repeat(100));
    large.failed(2, "PayloadTooLarge");
    let large = shop.run(&[&small[..], &arguments, &["12345678901"]].concat());
    large.failed(2, "PayloadTooLarge");
}

// conformance: memory/cli-dlq-edit-bad: what cannot be sent is refused with a reason, and the dead letter stays open
#[test]
fn what_cannot_be_sent_is_refused() {
    let shop = Shop::new();
    let tenants = [Some("acme"), Some("umbrella")];
    let id = buried(&shop, &["payment", "mail"], &tenants, "{}");
    let edit = |more: &[&str]| -> Ran { shop.run(&[&["dlq", "edit", &id], more].concat()) };
    let said = edit(&["--payload", "1"]).failed(2, "Usage");
    assert!(
        said.contains("acme, umbrella") && said.contains("--tenant"),
        "{said}"
    );
    let said = edit(&["--payload", "1", "--tenant", "acme"]).failed(2, "Usage");
    assert!(
        said.contains("mail and payment") && said.contains("--group"),
        "{said}"
    );
    let one = ["--tenant", "acme", "--group", "mail"];
    let said =
        edit(&[&one[..], &["--payload", "{\"a\":"]].concat()).failed(2, "InvalidPayloadError");
    assert!(said.contains("not JSON"), "{said}");
    assert!(said.contains("a text needs its quotes"), "{said}");
    let said = edit(&one).failed(2, "Usage");
    assert!(
        said.contains("no terminal") && said.contains("--payload"),
        "{said}"
    );
    edit(&["--payload", "1", "--group", "nobody"]).failed(3, "GroupNotFound");
    edit(&["--payload", "1", "--tenant", "nobody"]).failed(3, "NotFound");
    shop.run(&["dlq", "edit", "nope", "--payload", "1"])
        .failed(3, "NotFound");
    let open = shop.run(&["-o", "json", "dlq", "list"]).json();
    assert_eq!(open["dead_letters"].as_array().unwrap().len(), 4);
    edit(&[&one[..], &["--payload", "2"]].concat()).ok();
    let open = shop.run(&["-o", "json", "dlq", "list"]).json();
    assert_eq!(open["dead_letters"].as_array().unwrap().len(), 3);
}

/// Runs a command on a terminal of its own.
fn on_a_terminal(shop: &Shop, arguments: &[&str], editor: &str) -> (i32, String) {
    use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
    let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&master).unwrap();
    unlockpt(&master).unwrap();
    let name = ptsname(&master, Vec::new()).unwrap();
    // Not the terminal of this process, which would be told to hang up with it.
    let not_ours = i32::try_from(rustix::fs::OFlags::NOCTTY.bits()).unwrap();
    let slave = std::fs::File::options()
        .read(true)
        .write(true)
        .custom_flags(not_ours)
        .open(name.to_str().unwrap())
        .unwrap();
    let end = || Stdio::from(slave.as_fd().try_clone_to_owned().unwrap());
    let mut child = shop
        .command(arguments)
        .env_remove("VISUAL")
        .env("EDITOR", editor)
        .stdin(end())
        .stdout(end())
        .stderr(end())
        .spawn()
        .unwrap();
    drop(slave);
    let mut said = Vec::new();
    // The terminal hangs up, which is an error, when the last who has it open is gone.
    let _ = std::io::Read::read_to_end(&mut std::fs::File::from(master), &mut said);
    let code = child.wait().unwrap().code().unwrap();
    (code, String::from_utf8_lossy(&said).replace("\r\n", "\n"))
}

/// An editor that is a script: a program and an argument.
fn editor(shop: &Shop, name: &str, script: &str) -> String {
    let path = shop.path(name);
    std::fs::write(&path, script).unwrap();
    format!("sh {}", path.display())
}

// conformance: memory/cli-dlq-editor: without --payload the payload is edited with EDITOR, without a shell
#[test]
fn a_payload_is_edited_in_the_editor() {
    let shop = Shop::new();
    let id = buried(
        &shop,
        &["payment"],
        &[None],
        r#"{"amount":"ten","exact":1.50}"#,
    );
    let nothing = editor(&shop, "nothing.sh", "exit 0");
    let (code, said) = on_a_terminal(&shop, &["dlq", "edit", &id], &nothing);
    assert_eq!((code, said.trim()), (0, "unchanged; nothing was sent back"));
    let quits = editor(&shop, "quits.sh", "exit 3");
    let (code, said) = on_a_terminal(&shop, &["dlq", "edit", &id], &quits);
    assert_eq!(code, 1, "{said}");
    assert!(said.contains("nothing was sent back"), "{said}");
    let (code, said) = on_a_terminal(&shop, &["dlq", "edit", &id], "no-such-editor; touch pwned");
    assert_eq!(code, 1, "{said}");
    assert!(
        said.contains("no-such-editor;") && !shop.path("pwned").exists(),
        "{said}"
    );
    // A mistake is not the end of what was typed.
    let breaks = editor(&shop, "breaks.sh", "echo '{\"mine\":' > \"$1\"");
    let (code, said) = on_a_terminal(&shop, &["dlq", "edit", &id], &breaks);
    assert_eq!(code, 2, "{said}");
    let kept = said.split("what you wrote is in ").nth(1).unwrap();
    let kept = kept.split_whitespace().next().unwrap();
    assert_eq!(std::fs::read_to_string(kept).unwrap(), "{\"mine\":\n");
    std::fs::remove_file(kept).unwrap();
    let mends = editor(
        &shop,
        "mends.sh",
        "sed -i.old 's/\"ten\"/10/' \"$1\"; rm \"$1.old\"",
    );
    let (code, said) = on_a_terminal(&shop, &["dlq", "edit", &id], &mends);
    assert_eq!(code, 0, "{said}");
    assert!(
        said.contains("-   \"amount\": \"ten\",\n+   \"amount\": 10,\n"),
        "{said}"
    );
    assert!(said.contains("sent back to payment as "), "{said}");
    let letter = &shop.run(&["-o", "json", "dlq", "show", &id]).json()[0];
    let new = letter["replaced_by"].as_str().unwrap();
    let got = shop.run(&["-o", "json", "get", new]).json();
    assert_eq!(
        got["event"]["payload"],
        json!({"amount": 10, "exact": 1.50})
    );
}
