//! The dead letters: entries of `dlq:{stream}`. A hash for each group finds them.
//!
//! A letter that was retried or replaced leaves its stream, so that the length of the stream is the number of open
//! letters. It is kept in a hash until the event dies again, for at most a month.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use everbus_core::dead_letters::{MAX_PAGE, check_replacement, last_handler, not_open};
use everbus_core::{
    Appended, BoxFuture, DeadLetter, DeadLetterFilter, DeadLetterKey, DeadLetterPage,
    DeadLetterTally, DeadLetters, Event, EventId, GroupName, PageRequest, PurgeBasis, Purged,
    Recorded, Replaced, Result, Timestamp,
};
use everbus_core::{LETTER_PURGED, letter_kept_for, no_group};
use everbus_dialects::Dialect;
use redis::Value;

use crate::broker::{Redis, Shared};
use crate::client::{Arguments, Read};
use crate::errors;
use crate::groups::Record;
use crate::held::Hold;
use crate::keys::{self, EntryId};
use crate::scripts::{LETTERS, PURGE, REPLACE, RESTORE, REVIVE};
use crate::wire::{self, Around, Source};

/// How many letters are read or changed in one step.
const STEP: usize = 200;

/// A dead letter, and the name of its event on the server: `id@stream`.
struct Found {
    member: String,
    letter: DeadLetter,
}

impl Found {
    /// Newest event first.
    fn order(&self) -> (Reverse<u64>, &str, &str) {
        let position = self.letter.record.position;
        (
            Reverse(position.place()),
            position.shard().name(),
            self.letter.group.as_str(),
        )
    }
}

impl Shared {
    /// The letters of one group: the open ones, or those that were retried or replaced.
    async fn letters_of(&self, group: &str, which: &str) -> Result<Vec<Found>> {
        let mut found = Vec::new();
        let mut cursor = "0".to_owned();
        loop {
            let mut arguments = Arguments::default();
            arguments
                .text(group)
                .text(which)
                .text(&cursor)
                .number(STEP)
                .text("");
            let mut answer = self
                .link
                .run(&LETTERS, &arguments)
                .await?
                .list()?
                .into_iter();
            let mut part = || answer.next().unwrap_or(Value::Nil);
            cursor = part().text()?;
            for letter in part().list()? {
                found.push(self.found(letter)?);
            }
            if cursor == "0" {
                break;
            }
        }
        // HSCAN may return an entry twice.
        found.sort_by(|a: &Found, b: &Found| a.member.cmp(&b.member));
        found.dedup_by(|a, b| a.member == b.member);
        Ok(found)
    }

    /// The earlier letter of an event that was retried.
    pub(crate) async fn prior(&self, hold: &Hold) -> Result<Option<DeadLetter>> {
        let mut arguments = Arguments::default();
        arguments
            .text(hold.group.name.as_str())
            .text("old")
            .text("0")
            .number(1);
        arguments.text(&hold.member);
        let answer = self.link.run(&LETTERS, &arguments).await?.list()?;
        let letters = answer.into_iter().nth(1).unwrap_or(Value::Nil).list()?;
        let letter = letters.into_iter().next();
        Ok(letter
            .map(|letter| self.found(letter))
            .transpose()?
            .map(|found| found.letter))
    }

    fn found(&self, value: Value) -> Result<Found> {
        let mut parts = value.list()?.into_iter();
        let mut part = || parts.next().unwrap_or(Value::Nil);
        let member = part().text()?;
        let fields = part().list()?.into_iter().map(Read::bytes);
        let fields: Vec<Bytes> = fields.collect::<Result<_>>()?;
        let unreadable = || errors::unreadable("a dead letter");
        let (id, key) = member.split_once('@').ok_or_else(unreadable)?;
        let id = EntryId::parse(id).ok_or_else(unreadable)?;
        let text = |name: &str| {
            let mut pairs = fields.chunks_exact(2);
            let pair = pairs.find(|pair| pair[0] == name)?;
            Some(String::from_utf8_lossy(&pair[1]).into_owned()).filter(|text| !text.is_empty())
        };
        let time = |name: &str| text(name).and_then(|text| text.parse::<Timestamp>().ok());
        let source = Source::new(&self.space, key, Dialect::Native)?;
        let around = Around {
            space: &self.space,
            source: &source,
            id,
        };
        let read = wire::read(around, &fields);
        let position = id.position(source.shard);
        let failures = text("failures").and_then(|json| serde_json::from_str(&json).ok());
        let failures: Vec<everbus_core::Failure> = failures.unwrap_or_default();
        let died_at = time("failed_at").unwrap_or(read.received_at);
        let group: GroupName = text("group").unwrap_or_default().parse()?;
        let letter = DeadLetter {
            group,
            handler: last_handler(&failures).map(str::to_owned),
            attempts: text("attempts").and_then(|n| n.parse().ok()).unwrap_or(0),
            failures,
            first_seen_at: time("first_seen").unwrap_or(died_at),
            died_at,
            retried_at: time("retried_at"),
            replaced_by: text("replaced_by").and_then(|id| id.parse().ok()),
            record: Arc::new(Recorded::new(read.event, position, read.received_at)),
        };
        Ok(Found { member, letter })
    }

    /// The open letters that a filter takes, newest event first.
    async fn open_letters(&self, filter: &DeadLetterFilter) -> Result<Vec<Found>> {
        let mut all = Vec::new();
        for (record, _) in self.load_groups().await? {
            let other = filter
                .group
                .as_ref()
                .is_some_and(|g| g.as_str() != record.name);
            if record.owner.is_some() || other {
                continue;
            }
            let letters = self.letters_of(&record.name, "dead").await?;
            all.extend(
                letters
                    .into_iter()
                    .filter(|found| filter.matches(&found.letter)),
            );
        }
        all.sort_by(|a, b| a.order().cmp(&b.order()));
        Ok(all)
    }

    async fn retry_letters(&self, filter: &DeadLetterFilter, limit: usize) -> Result<u64> {
        let mut letters = self.open_letters(filter).await?;
        // Oldest event first.
        letters.reverse();
        letters.truncate(limit);
        let mut retried = 0;
        let mut rest = letters.as_slice();
        while let Some(first) = rest.first() {
            let group = &first.letter.group;
            let same = rest
                .iter()
                .take(STEP)
                .take_while(|found| found.letter.group == *group);
            let (step, later) = rest.split_at(same.count());
            rest = later;
            let Some((record, _)) = self.load_group(group.as_str()).await? else {
                continue;
            };
            let mut arguments = Arguments::default();
            arguments
                .text(group.as_str())
                .text(keys::group_name(group.as_str()))
                .text(if record.ordered { "1" } else { "0" })
                .text("letter")
                .number(self.options.clock.now())
                .number(step.len());
            for found in step {
                arguments.text(&found.member).text("0");
            }
            let answers = self.link.run(&REVIVE, &arguments).await?.list()?;
            for (answer, found) in answers.into_iter().zip(step) {
                retried += match answer.text()?.as_str() {
                    "queued" => 1,
                    "gone" => u64::from(self.restore(&record, found).await?),
                    _ => 0,
                };
            }
            if let Some(group) = self.groups.lock().get(group).cloned() {
                group.poke(std::time::Duration::ZERO);
            }
        }
        Ok(retried)
    }

    /// Retries a letter whose event was trimmed from its stream: the letter has a copy of the event. Returns `false` if
    /// the letter is no longer open.
    async fn restore(&self, record: &Record, found: &Found) -> Result<bool> {
        let group = &found.letter.group;
        let event = found.letter.event().clone().addressed_to(group);
        let key = found.member.split_once('@').map_or("", |(_, key)| key);
        let dialect = self.dialect(key, &self.registry());
        let fields = wire::write(&event, dialect, &self.space.types(key)[0])?;
        let wants = record.patterns()?;
        let wants = wants.iter().any(|p| p.matches(event.event_type()));
        let mut arguments = Arguments::default();
        arguments
            .text(group.as_str())
            .text(keys::group_name(group.as_str()))
            .text(if record.ordered { "1" } else { "0" })
            .text(if wants { "1" } else { "0" })
            .text(&found.member)
            .number(self.options.clock.now())
            .number(fields.len());
        for field in &fields {
            arguments.bytes(field);
        }
        let answer = self.link.run(&RESTORE, &arguments).await?.list()?;
        let mut answer = answer.into_iter();
        let mut part = || answer.next().unwrap_or(Value::Nil).text();
        match part()?.as_str() {
            "ok" => Ok(true),
            "none" => Ok(false),
            why => Err(self.refused(why, &part()?, None)),
        }
    }

    async fn replace_letter(&self, key: &DeadLetterKey, corrected: Event) -> Result<Appended> {
        let filter = DeadLetterFilter {
            group: Some(key.group.clone()),
            ..DeadLetterFilter::default()
        };
        let letters = self.open_letters(&filter).await?;
        let mut letters = letters.into_iter();
        let found = letters.find(|found| found.letter.record.position == key.position);
        let found = found.ok_or_else(|| not_open(key))?;
        check_replacement(found.letter.event(), &corrected)?;
        let corrected = corrected.addressed_to(&key.group);
        let Some((record, _)) = self.load_group(key.group.as_str()).await? else {
            return Err(no_group(&key.group));
        };
        let event_type = corrected.event_type();
        let wants = record
            .patterns()?
            .iter()
            .any(|pattern| pattern.matches(event_type));
        let mut arguments = Arguments::default();
        arguments
            .text(key.group.as_str())
            .text(keys::group_name(key.group.as_str()))
            .text(if record.ordered { "1" } else { "0" })
            .text(if wants { "1" } else { "0" })
            .text(&found.member)
            .number(self.options.clock.now())
            .number(corrected.id())
            .millis(self.options.window);
        self.write_event(&corrected, &mut arguments)?;
        let mut answer = self
            .link
            .run(&REPLACE, &arguments)
            .await?
            .list()?
            .into_iter();
        let mut part = || answer.next().unwrap_or(Value::Nil).text();
        let (said, id, stream) = (part()?, part()?, part()?);
        match said.as_str() {
            "ok" => {}
            "none" => return Err(not_open(key)),
            why => return Err(self.refused(why, &id, Some(corrected.id()))),
        }
        let id = EntryId::parse(&id).ok_or_else(|| errors::unreadable("an id"))?;
        if let Some(group) = self.groups.lock().get(&key.group).cloned() {
            group.poke(std::time::Duration::ZERO);
        }
        let position = id.position(self.space.shard(&stream)?);
        Ok(Appended::new(corrected.id(), position, id.time()))
    }

    /// How far the clock of this process is ahead of the server's, if that is more than a minute. Without this, a
    /// process with a wrong clock would treat new letters as old ones.
    async fn ahead_of_server(&self) -> Result<Duration> {
        let answer = self.link.ask(&redis::cmd("TIME")).await?.list()?;
        let mut parts = answer.into_iter().map(Read::number);
        let seconds = parts.next().transpose()?.unwrap_or(0);
        let server = Timestamp::EPOCH.plus(Duration::from_secs(seconds));
        let ahead = self.options.clock.now().since(server);
        Ok(match ahead > Duration::from_secs(60) {
            true => ahead,
            false => Duration::ZERO,
        })
    }

    /// Removes open letters up to and including `cutoff`. Their events stay if `kept_for` has the age of the letters;
    /// otherwise an event that no other group needs is removed with its letter.
    async fn purge_letters(
        &self,
        cutoff: Timestamp,
        basis: PurgeBasis,
        filter: &DeadLetterFilter,
        kept_for: Option<Duration>,
    ) -> Result<Purged> {
        let mut letters = self.open_letters(filter).await?;
        let cutoff = cutoff.minus(self.ahead_of_server().await?);
        // The time of receipt is by the clock of the server, and no event died before it was received.
        letters.retain(|found| {
            let time = basis.time_of(&found.letter);
            time.max(found.letter.record.received_at) <= cutoff
        });
        let groups = self.load_groups().await?;
        let reason = kept_for.map_or_else(|| LETTER_PURGED.to_owned(), letter_kept_for);
        let mut purged = Purged::default();
        for found in letters {
            let letter = found.letter;
            let event_type = letter.event().event_type();
            let mut wanting = Vec::new();
            for (record, _) in &groups {
                let patterns = record.patterns()?;
                let wants = patterns.iter().any(|pattern| pattern.matches(event_type));
                if record.owner.is_none() && wants {
                    wanting.push(keys::group_name(&record.name));
                }
            }
            let mut arguments = Arguments::default();
            arguments
                .text(letter.group.as_str())
                .text(&reason)
                .text(if kept_for.is_some() { "1" } else { "0" })
                .number(1);
            arguments.text(&found.member).list(&wanting);
            let answer = self.link.run(&PURGE, &arguments).await?.list()?;
            let answer = answer.into_iter().next().unwrap_or(Value::Nil).text()?;
            if !answer.is_empty() {
                purged.add(letter.event().id(), letter.group.clone(), answer == "1");
            }
        }
        Ok(purged)
    }
}

impl DeadLetters for Redis {
    fn list(
        &self,
        filter: DeadLetterFilter,
        page: PageRequest,
    ) -> BoxFuture<'_, Result<DeadLetterPage>> {
        Box::pin(async move {
            let _running = self.shared.link.enter()?;
            page.validate()?;
            let letters = self.shared.open_letters(&filter).await?;
            let mut letters = letters.into_iter().map(|found| found.letter).peekable();
            if let Some(after) = &page.after {
                let known = |letter: &DeadLetter| {
                    let at = |key: &DeadLetterKey| {
                        let (position, group) = (key.position, key.group.as_str().to_owned());
                        (Reverse(position.place()), position.shard().name(), group)
                    };
                    at(&letter.key()) <= at(after)
                };
                while letters.next_if(known).is_some() {}
            }
            let mut letters = letters.skip(page.offset);
            let items: Vec<DeadLetter> = letters.by_ref().take(page.limit).collect();
            let more = letters.next().is_some();
            let next = items.last().filter(|_| more).map(DeadLetter::key);
            Ok(DeadLetterPage { items, next })
        })
    }

    fn count(&self, filter: DeadLetterFilter) -> BoxFuture<'_, Result<u64>> {
        Box::pin(async move {
            let _running = self.shared.link.enter()?;
            Ok(self.shared.open_letters(&filter).await?.len() as u64)
        })
    }

    fn tally(
        &self,
        filter: DeadLetterFilter,
        limit: usize,
    ) -> BoxFuture<'_, Result<Vec<DeadLetterTally>>> {
        Box::pin(async move {
            let _running = self.shared.link.enter()?;
            let mut counts: BTreeMap<(GroupName, String, String), u64> = BTreeMap::new();
            for Found { letter, .. } in self.shared.open_letters(&filter).await? {
                let error = DeadLetterTally::beginning(letter.last_error()).to_owned();
                let event_type = letter.event().event_type().to_owned();
                *counts.entry((letter.group, event_type, error)).or_default() += 1;
            }
            let tallies = counts.into_iter();
            let tallies = tallies.map(|((group, event_type, error), count)| DeadLetterTally {
                group,
                event_type,
                error,
                count,
            });
            let mut tallies: Vec<DeadLetterTally> = tallies.collect();
            // A stable sort: equal counts stay in the order of their names.
            tallies.sort_by_key(|tally| Reverse(tally.count));
            tallies.truncate(limit.min(MAX_PAGE));
            Ok(tallies)
        })
    }

    fn get(&self, id: EventId) -> BoxFuture<'_, Result<Vec<DeadLetter>>> {
        Box::pin(async move {
            let shared = &self.shared;
            let _running = shared.link.enter()?;
            let mut letters = Vec::new();
            for (record, _) in shared.load_groups().await? {
                for which in ["dead", "old"] {
                    let of_group = shared.letters_of(&record.name, which).await?;
                    let of_group = of_group.into_iter().map(|found| found.letter);
                    letters.extend(of_group.filter(|letter| letter.event().id() == id));
                }
            }
            Ok(letters)
        })
    }

    fn retry(&self, filter: DeadLetterFilter) -> BoxFuture<'_, Result<u64>> {
        self.retry_some(filter, usize::MAX)
    }

    fn retry_some(&self, filter: DeadLetterFilter, limit: usize) -> BoxFuture<'_, Result<u64>> {
        Box::pin(async move {
            let _running = self.shared.link.enter()?;
            self.shared.retry_letters(&filter, limit).await
        })
    }

    fn replace(&self, key: DeadLetterKey, corrected: Event) -> BoxFuture<'_, Result<Appended>> {
        Box::pin(async move {
            let _running = self.shared.link.enter()?;
            self.shared.replace_letter(&key, corrected).await
        })
    }

    fn replaced(&self) -> BoxFuture<'_, Result<Vec<Replaced>>> {
        Box::pin(async move {
            let shared = &self.shared;
            let _running = shared.link.enter()?;
            let mut replaced = Vec::new();
            for (record, _) in shared.load_groups().await? {
                for Found { letter, .. } in shared.letters_of(&record.name, "old").await? {
                    if let Some(by) = letter.replaced_by {
                        replaced.push(Replaced {
                            key: letter.key(),
                            by,
                        });
                    }
                }
            }
            replaced.sort_by_key(|replaced| replaced.key.position.place());
            Ok(replaced)
        })
    }

    fn purge(
        &self,
        cutoff: Timestamp,
        basis: PurgeBasis,
        filter: DeadLetterFilter,
    ) -> BoxFuture<'_, Result<Purged>> {
        Box::pin(async move {
            let _running = self.shared.link.enter()?;
            let purged = self.shared.purge_letters(cutoff, basis, &filter, None);
            purged.await
        })
    }

    fn expire(&self, now: Timestamp, age: Duration) -> BoxFuture<'_, Result<u64>> {
        Box::pin(async move {
            let _running = self.shared.link.enter()?;
            let (cutoff, all) = (now.minus(age), DeadLetterFilter::default());
            let purged = self
                .shared
                .purge_letters(cutoff, PurgeBasis::Died, &all, Some(age));
            Ok(purged.await?.dead_letters)
        })
    }
}
