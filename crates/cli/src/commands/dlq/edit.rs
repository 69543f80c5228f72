//! `everbus dlq edit`: send a dead letter back with another payload.

use std::collections::BTreeSet;
use std::io::{ErrorKind, IsTerminal as _, Read};
use std::path::Path;

use everbus::Receipt;
use everbus_core::{Code, DeadLetter, Engine, Error, Event, EventId, GroupName};
use serde::Serialize;
use serde_json::value::RawValue;

use super::args::DlqEditArgs;
use super::editor::{Edited, changes, compact, edit_text, indented};
use super::{group_or_outbox, why_not};
use crate::commands::{event_id, until_interrupted};
use crate::open::{Target, blocking, close};
use crate::output::{Output, escaped, shell_word};
use crate::stop::{Outcome, Stop};

/// Limit for reading where the payload limit is not known; the bus makes the final check.
const MOST: usize = 64 << 20;

pub(super) async fn run(args: DlqEditArgs, target: &Target, output: &mut Output) -> Outcome {
    let opened = until_interrupted(async {
        let engine = target.open_existing().await?;
        match find(&args, &engine).await {
            Ok(letter) => Ok((engine, letter)),
            Err(stop) => {
                close(&engine).await;
                Err(stop)
            }
        }
    });
    let (engine, letter) = opened.await?;
    let outcome = edit(&args, letter, &engine, target, output).await;
    close(&engine).await;
    outcome
}

/// The open dead letter that the arguments name.
async fn find(args: &DlqEditArgs, engine: &Engine) -> Outcome<DeadLetter> {
    if let Some(group) = &args.group {
        group_or_outbox(group, engine).await?;
    }
    let id = event_id(&args.id, args.source.as_deref());
    let mut open = engine.dead_letters()?.get(id).await?;
    open.retain(|letter| {
        letter.retried_at.is_none()
            && args.group.as_ref().is_none_or(|g| *g == letter.group)
            && (args.tenant.is_none() || args.tenant.as_deref() == letter.event().tenant())
    });
    let tenants: BTreeSet<&str> = open.iter().map(tenant).collect();
    if tenants.len() > 1 {
        let which = tenants.into_iter().collect::<Vec<_>>().join(", ");
        let message = format!("{:?} is the id of an event in each of {which}", args.id);
        return Err(Stop::usage(message, Some("say which with --tenant")));
    }
    if open.len() > 1 {
        let groups: Vec<String> = open.iter().map(|l| l.group.to_string()).collect();
        let message = format!("{} gave up on {:?}", groups.join(" and "), args.id);
        let hint = "each has its own dead letter: say which with --group";
        return Err(Stop::usage(message, Some(hint)));
    }
    match open.pop() {
        Some(letter) => Ok(letter),
        None => {
            let why = why_not(&args.id, id, args.group.as_ref(), engine).await?;
            Err(Stop::not_found(why.message, &why.hint))
        }
    }
}

fn tenant(letter: &DeadLetter) -> &str {
    letter.event().tenant().unwrap_or("(no tenant)")
}

async fn edit(
    args: &DlqEditArgs,
    mut letter: DeadLetter,
    engine: &Engine,
    target: &Target,
    output: &mut Output,
) -> Outcome {
    let bus = target.bus_on(engine.clone()).await?;
    letter.record = bus.whole(&letter.record).await?;
    let letter = &letter;
    let original = letter.event();
    let (payload, kept) = match &args.payload {
        Some(given) => (until_interrupted(read(given, target)).await?, None),
        None => match in_editor(args, original).await? {
            Edited::Unchanged => {
                if output.is_json() {
                    return output.json(&report(letter, original, None, args.dry_run));
                }
                return output.line("unchanged; nothing was sent back");
            }
            Edited::Changed { text, file } => {
                let text = if original.is_json() {
                    compact(text)
                } else {
                    text
                };
                (text.into_bytes(), Some(file))
            }
        },
    };
    let letters = bus.dead_letters();
    let corrected = letters.corrected(letter, payload).map_err(|error| {
        // The edited text is kept if it is not valid.
        let path = kept.and_then(|file| file.into_temp_path().keep().ok());
        with_text_kept(error, path.as_deref())
    })?;
    if !output.is_json() {
        for line in changes(&shown(original), &shown(&corrected)) {
            output.line(escaped(&line))?;
        }
    }
    if args.dry_run {
        if output.is_json() {
            return output.json(&report(letter, &corrected, None, true));
        }
        return output.line(format!(
            "would send it back to {}",
            escaped(&letter.group.to_string())
        ));
    }
    let sent = letters.replace(letter, corrected.clone());
    let sent = until_interrupted(async { Ok(sent.await?) });
    let receipt = target.patiently(sent).await?;
    if output.is_json() {
        return output.json(&report(letter, &corrected, Some(&receipt), false));
    }
    output.line(format!(
        "sent back to {} as {} at {}",
        escaped(&letter.group.to_string()),
        receipt.id(),
        receipt.seq()
    ))
}

/// The event that was, or would be, sent in place of a dead letter.
#[derive(Serialize)]
struct Report<'a> {
    id: EventId,
    group: &'a GroupName,
    original: Shown<'a>,
    payload: Shown<'a>,
    replaced_by: Option<EventId>,
    seq: Option<u64>,
    dry_run: bool,
}

/// A payload in JSON output: JSON as it was written, text as text, other bytes left out.
#[derive(Serialize)]
#[serde(untagged)]
enum Shown<'a> {
    Json(&'a RawValue),
    Text(&'a str),
    Nothing,
}

impl<'a> Shown<'a> {
    fn of(event: &'a Event) -> Self {
        match std::str::from_utf8(event.payload()) {
            Ok(text) if event.is_json() => {
                serde_json::from_str(text).map_or(Self::Text(text), Self::Json)
            }
            Ok(text) => Self::Text(text),
            Err(_) => Self::Nothing,
        }
    }
}

fn report<'a>(
    letter: &'a DeadLetter,
    corrected: &'a Event,
    sent: Option<&Receipt>,
    dry_run: bool,
) -> Report<'a> {
    let original = letter.event();
    Report {
        id: original.id(),
        group: &letter.group,
        original: Shown::of(original),
        payload: Shown::of(corrected),
        replaced_by: sent.map(Receipt::id),
        seq: sent.map(Receipt::seq),
        dry_run,
    }
}

/// The payload as lines.
fn shown(event: &Event) -> String {
    match std::str::from_utf8(event.payload()) {
        Ok(text) if event.is_json() => indented(text),
        Ok(text) => text.to_owned(),
        Err(_) => format!("({} bytes)", event.payload().len()),
    }
}

async fn in_editor(args: &DlqEditArgs, original: &Event) -> Outcome<Edited> {
    let id = shell_word(&args.id);
    let hint = format!("`everbus dlq edit {id} --payload @FILE` takes it from a file");
    if !std::io::stdin().is_terminal() || !std::io::stdout().is_terminal() {
        let message = "there is no terminal to edit on, and no --payload";
        return Err(Stop::usage(message, Some(&hint)));
    }
    if std::str::from_utf8(original.payload()).is_err() {
        let message = "the payload is not text, so it cannot be edited";
        return Err(Stop::usage(message, Some(&hint)));
    }
    edit_text(shown(original), original.is_json()).await
}

/// The payload that `--payload` names.
async fn read(given: &str, target: &Target) -> Outcome<Vec<u8>> {
    let limit = target.max_payload().unwrap_or(MOST);
    let (from, file) = match given.strip_prefix('@') {
        _ if given == "-" => ("standard input".to_owned(), None),
        Some(path) => (path.to_owned(), Some(path.to_owned())),
        None => return Ok(given.as_bytes().to_vec()),
    };
    let what = from.clone();
    let read = blocking(move || {
        let mut bytes = Vec::new();
        // One more than allowed, to notice that it is too much.
        let most = limit as u64 + 1;
        let done = match &file {
            None => std::io::stdin().lock().take(most).read_to_end(&mut bytes),
            Some(path) => {
                std::fs::File::open(path).and_then(|f| f.take(most).read_to_end(&mut bytes))
            }
        };
        Ok(done.map(|_| bytes))
    });
    let mut bytes = read.await?.map_err(|error| match error.kind() {
        ErrorKind::NotFound => Error::new(Code::NoSuchFile, format!("there is no file {what}"))
            .hint("--payload @FILE reads the payload from that file")
            .into(),
        _ => Stop::Io(format!("{what}: {error}")),
    })?;
    if bytes.len() > limit {
        let message = format!("{from} has more than {limit} bytes");
        return Err(Error::new(Code::PayloadTooLarge, message)
            .hint("--max-payload says how large a payload may be")
            .into());
    }
    // The line break at the end is not part of the payload.
    let end = bytes.trim_ascii_end().len();
    bytes.truncate(end);
    Ok(bytes)
}

fn with_text_kept(error: Error, path: Option<&Path>) -> Stop {
    let Some(path) = path else {
        if error.code() != Code::InvalidPayloadError {
            return error.into();
        }
        let hint = "the event has JSON for its payload; a text needs its quotes: '\"text\"'";
        return Error::new(error.code(), error.message()).hint(hint).into();
    };
    let mut hint = format!("what you wrote is in {}", path.display());
    if let Some(own) = error.hint_text() {
        hint = format!("{own}; {hint}");
    }
    error.hint(hint).into()
}
