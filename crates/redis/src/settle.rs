//! Settling: each verdict with everything that belongs to it, in one script.
//!
//! The script compares the token of the delivery and the end of its lease. Then ack, dead letter, notice, inbox
//! record and follow-ups happen together, or nothing does.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use everbus_core::{
    Code, DeadLetter, Death, Error, Event, Lease, Result, Settlement, Timestamp, Verdict,
    dead_letter_notice, given_up,
};
use everbus_dialects::{Dialect, encode};

use crate::broker::Shared;
use crate::client::{Arguments, Read};
use crate::groups::Group;
use crate::held::Hold;
use crate::scripts::{EXTEND, SETTLE};
use crate::wire;

/// One verdict as the script takes it.
struct Told<'a> {
    group: &'a Group,
    member: &'a str,
    proof: &'a str,
    verdict: &'static str,
    after: Duration,
    failure: String,
    reason: String,
    inbox: String,
    letter: Option<(String, wire::Fields)>,
    notice: Option<Event>,
    follow_ups: Vec<Event>,
}

impl<'a> Told<'a> {
    fn new(group: &'a Group, member: &'a str, proof: &'a str, verdict: &'static str) -> Self {
        Self {
            group,
            member,
            proof,
            verdict,
            after: Duration::ZERO,
            failure: String::new(),
            reason: String::new(),
            inbox: String::new(),
            letter: None,
            notice: None,
            follow_ups: Vec::new(),
        }
    }
}

impl Shared {
    pub(crate) async fn settle(&self, settlements: Vec<Settlement>) -> Result<Vec<Result<()>>> {
        let mut answers: Vec<Option<Result<()>>> = Vec::with_capacity(settlements.len());
        let (mut places, mut leases, mut pokes) = (Vec::new(), Vec::new(), Vec::new());
        let mut arguments = Arguments::default();
        for (index, settlement) in settlements.into_iter().enumerate() {
            let lease = settlement.lease.clone();
            let Some(hold) = self.held.find(&lease) else {
                answers.push(Some(Err(lost())));
                continue;
            };
            let prior = match (&settlement.verdict, hold.again) {
                (Verdict::Dead { .. }, true) => self.prior(&hold).await?,
                _ => None,
            };
            let mark = arguments.mark();
            let told = self.told(settlement, &hold, prior);
            let written = told.and_then(|told| {
                self.write_verdict(&told, &mut arguments)?;
                Ok((told.verdict, told.after))
            });
            match written {
                Ok((verdict, after)) => {
                    pokes.push((hold.clone(), verdict, after));
                    places.push(index);
                    leases.push(lease);
                    answers.push(None);
                }
                Err(error) => {
                    arguments.cut(mark);
                    answers.push(Some(Err(error)));
                }
            }
        }
        if !places.is_empty() {
            let told = self.tell(places.len(), &arguments).await?;
            for (place, answer) in places.iter().zip(told) {
                answers[*place] = Some(self.answered(&answer));
            }
            let is_over = |place: &usize| match &answers[*place] {
                Some(Err(error)) => error.code() == Code::LeaseLost,
                answer => answer.is_some(),
            };
            let over = places.iter().zip(&leases);
            let over = over.filter(|(place, _)| is_over(place));
            self.held.free(over.map(|(_, lease)| lease));
            for (hold, verdict, after) in pokes {
                if matches!(verdict, "R" | "L") || hold.group.record().ordered {
                    hold.group.poke(after);
                }
            }
        }
        let missing = || Err(Error::new(Code::Internal, "a verdict was not answered"));
        let answers = answers.into_iter();
        Ok(answers.map(|a| a.unwrap_or_else(missing)).collect())
    }

    async fn tell(&self, count: usize, verdicts: &Arguments) -> Result<Vec<Bytes>> {
        let mut arguments = Arguments::default();
        arguments
            .millis(self.options.window)
            .number(count)
            .append(verdicts);
        let answers = self.link.run(&SETTLE, &arguments).await?.list()?;
        answers.into_iter().map(Read::bytes).collect()
    }

    fn answered(&self, answer: &[u8]) -> Result<()> {
        if answer == b"ok" {
            return Ok(());
        }
        let answer = &*String::from_utf8_lossy(answer);
        match answer.split_once(' ').unwrap_or((answer, "")) {
            ("lost", _) => Err(lost()),
            (why, detail) => Err(self.refused(why, detail, None)),
        }
    }

    /// Settles events that no handler saw. `None` finishes an event; a duration gives it back, due after that time.
    pub(crate) async fn put_aside(
        &self,
        group: &Arc<Group>,
        events: &[(Arc<str>, Arc<str>, Option<Duration>)],
    ) -> Result<()> {
        let mut arguments = Arguments::default();
        for (member, proof, after) in events {
            let verdict = if after.is_some() { "L" } else { "A" };
            let mut told = Told::new(group, member, proof, verdict);
            told.after = after.unwrap_or_default();
            self.write_verdict(&told, &mut arguments)?;
        }
        self.tell(events.len(), &arguments).await.map(drop)
    }

    fn told<'a>(
        &self,
        settlement: Settlement,
        hold: &'a Hold,
        prior: Option<DeadLetter>,
    ) -> Result<Told<'a>> {
        let Settlement {
            verdict,
            follow_ups,
            inbox,
            effect,
            ..
        } = settlement;
        if effect.is_some() {
            let what = "Redis has no transactions for effects";
            return Err(Error::new(Code::Unsupported, what)
                .hint("do the effect in the handler, with the context's idempotency key"));
        }
        let mut told = Told::new(&hold.group, &hold.member, &hold.proof, "A");
        told.follow_ups = follow_ups;
        match verdict {
            Verdict::Ack => {
                if inbox {
                    told.inbox = wire::id_name(&hold.record.event);
                }
            }
            Verdict::Skip { reason } => (told.verdict, told.reason) = ("S", reason),
            Verdict::Retry { after, failure } => {
                told.verdict = "R";
                told.after = after;
                told.failure = serde_json::to_string(&failure)
                    .map_err(|e| Error::new(Code::Internal, format!("a failure: {e}")))?;
            }
            Verdict::Release { after } => (told.verdict, told.after) = ("L", after),
            Verdict::Dead { failure } => {
                told.verdict = "D";
                let now = self.options.clock.now();
                let death = Death::new(hold.attempt, hold.failures.clone(), failure, now);
                let first_seen = prior.as_ref().map(|letter| letter.first_seen_at);
                let death = match prior {
                    Some(letter) => death.after(letter.attempts, letter.failures),
                    None => death,
                };
                let last = death.failures.last();
                if hold.group.record().owner.is_some() {
                    told.reason = given_up(last);
                } else {
                    let (record, attempts) = (&hold.record, death.attempts);
                    told.notice =
                        dead_letter_notice(record, &hold.group.name, attempts, last, death.died_at);
                    told.letter = Some(self.letter(hold, &death, first_seen)?);
                }
            }
        }
        Ok(told)
    }

    /// The dead letter: the fields of the specification, then what Everbus knows beside them.
    fn letter(
        &self,
        hold: &Hold,
        death: &Death,
        first_seen: Option<Timestamp>,
    ) -> Result<(String, wire::Fields)> {
        let event = &hold.record.event;
        // An event that cannot be written as a document is kept as the bytes of its payload.
        let original: Bytes = match encode(event, Dialect::Framework) {
            Ok(document) => document.into(),
            Err(_) => event.payload().clone(),
        };
        let error = death.failures.last().map_or("", |f| f.error.as_str());
        let failures = serde_json::to_string(&death.failures)
            .map_err(|e| Error::new(Code::Internal, format!("failures: {e}")))?;
        let mut fields = wire::Fields::new();
        let mut field = |name: &'static str, value: Bytes| {
            fields.push(Bytes::from_static(name.as_bytes()));
            fields.push(value);
        };
        field("original_event", original);
        field("error", error.to_owned().into());
        field("attempts", death.attempts.to_string().into());
        field("failed_at", death.died_at.to_string().into());
        field("original_stream", hold.key.to_string().into());
        field("group", hold.group.name.as_str().to_owned().into());
        field("position", hold.record.position.to_string().into());
        field("failures", failures.into());
        let first_seen = first_seen.unwrap_or(death.died_at);
        field("first_seen", first_seen.to_string().into());
        let dotted = &self.space.types(&hold.key)[0];
        fields.extend(wire::write(event, Dialect::Native, dotted)?);
        Ok((self.space.dead(&hold.key), fields))
    }

    fn write_verdict(&self, told: &Told<'_>, arguments: &mut Arguments) -> Result<()> {
        let plain = told.verdict == "A" && told.inbox.is_empty() && told.follow_ups.is_empty();
        arguments
            .text(if plain { "K" } else { told.verdict })
            .text(told.group.name.as_str())
            .text(told.group.on_server())
            .text(told.member)
            .text(told.proof);
        if plain {
            return Ok(());
        }
        arguments
            .millis(told.after)
            .text(&told.failure)
            .text(&told.reason)
            .text(&told.inbox);
        match &told.letter {
            Some((key, fields)) => {
                arguments.text(key).number(fields.len());
                for field in fields {
                    arguments.bytes(field);
                }
            }
            None => _ = arguments.text("").number(0),
        }
        // A stream table without the system's types has no place for a notice.
        let notice = told.notice.as_ref();
        let notice = notice.filter(|event| self.route(event.event_type()).is_ok());
        arguments.number(usize::from(notice.is_some()));
        if let Some(notice) = notice {
            self.write_event(notice, arguments)?;
        }
        arguments.number(told.follow_ups.len());
        for event in &told.follow_ups {
            self.write_event(event, arguments)?;
        }
        Ok(())
    }

    pub(crate) async fn extend(&self, leases: Vec<Lease>, by: Duration) -> Result<Vec<Result<()>>> {
        let holds: Vec<Option<Arc<Hold>>> =
            leases.iter().map(|lease| self.held.find(lease)).collect();
        let known = leases.iter().zip(&holds);
        let known = known.filter_map(|(lease, hold)| Some((lease, hold.as_ref()?)));
        let known: Vec<(&Lease, &Arc<Hold>)> = known.collect();
        let mut arguments = Arguments::default();
        arguments.millis(by).number(known.len());
        for (_, hold) in &known {
            arguments
                .text(hold.group.name.as_str())
                .text(&hold.member)
                .text(&hold.proof);
        }
        let mut extended = match known.is_empty() {
            true => Vec::new().into_iter(),
            false => self
                .link
                .run(&EXTEND, &arguments)
                .await?
                .list()?
                .into_iter(),
        };
        let mut answers = Vec::with_capacity(leases.len());
        for (lease, hold) in leases.iter().zip(&holds) {
            let extended = match hold {
                Some(_) => extended.next().map_or(Ok(String::new()), Read::text)? == "1",
                None => false,
            };
            answers.push(match extended {
                true => {
                    self.held.extend(lease, by);
                    Ok(())
                }
                false => Err(lost()),
            });
        }
        Ok(answers)
    }
}

fn lost() -> Error {
    Error::new(
        Code::LeaseLost,
        "the lease has ended, or the delivery was settled",
    )
    .hint("the event was or will be delivered again; extend leases of long work")
}
