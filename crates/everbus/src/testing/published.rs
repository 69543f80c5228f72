//! The published events of a test, and assertions about them.

use std::fmt::Write as _;
use std::panic::Location;

use everbus_core::{
    DeadLetter, DeadLetterFilter, Event, EventId, PageRequest, Pattern, Recorded, Result,
    TypedEvent,
};
use serde::de::DeserializeOwned;

use super::bus::TestBus;

/// At most this many events are listed in a message.
const MOST_LISTED: usize = 30;
/// Payloads are cut at this length.
const MOST_SHOWN: usize = 200;

impl TestBus {
    /// The events of a type that were published since the test bus began, in order, by the test, by
    /// handlers or by other publishers. Other versions of the type are left out.
    ///
    /// # Panics
    ///
    /// If one of them cannot be read.
    #[track_caller]
    pub fn published<T: TypedEvent + DeserializeOwned>(&self) -> Vec<T> {
        let events = self.journal().events();
        let of_type = events
            .iter()
            .map(|record| &record.event)
            .filter(|event| is::<T>(event));
        of_type.map(read).collect()
    }

    /// The events whose types match a pattern and that were published since the test bus began, in order,
    /// as recorded. `*` leaves out the system's own events.
    ///
    /// # Panics
    ///
    /// If the pattern is invalid.
    #[track_caller]
    pub fn published_events(&self, pattern: &str) -> Vec<Recorded> {
        let pattern = match Pattern::new(pattern) {
            Ok(pattern) => pattern,
            Err(error) => panic!("{error}"),
        };
        let events = self.journal().events();
        let matching = events
            .iter()
            .filter(|record| pattern.matches(record.event.event_type()));
        matching.map(|record| (**record).clone()).collect()
    }

    /// The one event of a type that was published.
    ///
    /// # Panics
    ///
    /// If there is none or more than one; the message lists what was published.
    #[track_caller]
    pub fn assert_published<T: TypedEvent + DeserializeOwned>(&self) -> T {
        self.only_one("", self.published::<T>())
    }

    /// The one event of a type that was published and meets the condition.
    ///
    /// # Panics
    ///
    /// If there is none or more than one; the message lists what was published.
    #[track_caller]
    pub fn assert_published_where<T: TypedEvent + DeserializeOwned>(
        &self,
        mut condition: impl FnMut(&T) -> bool,
    ) -> T {
        let found = self
            .published::<T>()
            .into_iter()
            .filter(|event| condition(event));
        self.only_one(" for which the condition holds", found.collect())
    }

    /// Panics if an event of this type was published, in any version.
    #[track_caller]
    pub fn assert_not_published<T: TypedEvent>(&self) {
        let events = self.journal().events();
        let count = events
            .iter()
            .filter(|r| r.event.event_type() == T::TYPE)
            .count();
        assert!(
            count == 0,
            "expected no {}, but {count} published. {}",
            T::TYPE,
            self.everything()
        );
    }

    /// Panics unless at least one group is subscribed to the event and all subscribed groups have handled
    /// it.
    #[track_caller]
    pub fn assert_handled(&self, id: EventId) {
        match self.journal().report_of(id) {
            Some(report) => report.assert_handled(),
            None => panic!("no event {id} was published. {}", self.everything()),
        }
    }

    #[track_caller]
    fn only_one<T: TypedEvent>(&self, which: &str, mut found: Vec<T>) -> T {
        match (found.pop(), found.len()) {
            (Some(only), 0) => only,
            (rest, earlier) => {
                let (name, version) = (T::TYPE, T::VERSION);
                let count = match earlier + usize::from(rest.is_some()) {
                    0 => "none was".to_owned(),
                    count => format!("{count} were"),
                };
                let everything = self.everything();
                panic!(
                    "expected one {name} (version {version}){which}, but {count} published. {everything}"
                )
            }
        }
    }

    /// All published events, for a message.
    fn everything(&self) -> String {
        let events = self.journal().events();
        if events.is_empty() {
            return "Nothing was published.".to_owned();
        }
        let mut text = String::from("Published were:");
        for record in events.iter().take(MOST_LISTED) {
            let event = &record.event;
            let (name, version) = (event.event_type(), event.version());
            let _ = write!(text, "\n  {name} (version {version}) {}", shown(event));
        }
        if let Some(more) = events
            .len()
            .checked_sub(MOST_LISTED)
            .filter(|more| *more > 0)
        {
            let _ = write!(text, "\n  and {more} more");
        }
        text
    }

    /// The open dead letters of events that were published since the test bus began, newest first.
    pub async fn dead_letters(&self) -> Result<Vec<DeadLetter>> {
        let mut letters = Vec::new();
        let mut page = PageRequest::default();
        loop {
            let queue = self.bus().dead_letters();
            let found = queue
                .list_page(DeadLetterFilter::default(), page.clone())
                .await?;
            letters.extend(found.items);
            match found.next {
                Some(next) => page.after = Some(next),
                None => break,
            }
        }
        letters.retain(|letter| !self.began_after().covers(letter.record.position));
        Ok(letters)
    }

    /// Panics if there are dead letters; the message lists them with their errors and names the caller's
    /// location.
    #[track_caller]
    pub fn assert_no_dead_letters(&self) -> impl Future<Output = ()> + Send + use<'_> {
        let caller = Location::caller();
        async move {
            let letters = match self.dead_letters().await {
                Ok(letters) => letters,
                Err(error) => panic!("{error} (asked at {caller})"),
            };
            let mut text = String::new();
            for letter in letters.iter().take(MOST_LISTED) {
                let (event, group) = (letter.event(), &letter.group);
                let (name, error) = (event.event_type(), letter.last_error());
                let _ = write!(
                    text,
                    "\n  {name} {} in group {group}: {error}",
                    event.display_id()
                );
            }
            let count = letters.len();
            assert!(
                letters.is_empty(),
                "expected no dead letters, but there are {count} ({caller}):{text}"
            );
        }
    }
}

fn is<T: TypedEvent>(event: &Event) -> bool {
    event.event_type() == T::TYPE && event.version() == T::VERSION
}

#[track_caller]
fn read<T: TypedEvent + DeserializeOwned>(event: &Event) -> T {
    match event.typed() {
        Ok(value) => value,
        Err(error) => panic!("{error}"),
    }
}

/// The payload as one line of limited length.
fn shown(event: &Event) -> String {
    let text = String::from_utf8_lossy(event.payload());
    let mut line: String = text
        .chars()
        .take(MOST_SHOWN)
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect();
    if line.len() < text.len() {
        line.push('…');
    }
    line
}
