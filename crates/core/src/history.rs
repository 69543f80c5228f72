//! The history: what happened to a tenant, an app or an entity, page by page.
//!
//! A query filters by tenant, app, entity, type and correlation id. The eight combinations of the *workflow* table
//! have an index each; for others the store combines indexes. The order is that of the log, which is the order of
//! [`Recorded::received_at`]: it never changes and never decreases, whatever the clocks of the publishers
//! do, so a page that was read stays the same.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use serde::{Serialize, Serializer};

use crate::broker::BoxFuture;
use crate::error::{Code, Error, Result};
use crate::event::{Entity, Event};
use crate::log::Recorded;
use crate::pattern::Pattern;
use crate::position::{Position, Shard};
use crate::time::Timestamp;

/// The largest page of a history.
pub const MAX_HISTORY_PAGE: usize = 10_000;

/// A page ends early once its payloads have more bytes than this; the rest is in the next page.
pub const MAX_HISTORY_BYTES: usize = 16 << 20;

/// The order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Order {
    /// Newest first.
    #[default]
    Newest,
    /// Oldest first.
    Oldest,
}

/// Selects events, with an order and a start. The default is the newest hundred of all.
///
/// ```
/// use everbus_core::{HistoryQuery, Order};
/// let query = HistoryQuery::default()
///     .tenant("acme")
///     .entity("TASK", "req-123")
///     .order(Order::Oldest)
///     .limit(20);
/// query.validate()?;
/// # Ok::<(), everbus_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HistoryQuery {
    /// Only of this tenant.
    pub tenant: Option<String>,
    /// Only of this app.
    pub app: Option<String>,
    /// Only about this entity.
    pub entity: Option<Entity>,
    /// Only types that match. An exact type can use an index.
    pub types: Option<Pattern>,
    /// Only events that were published with this correlation id. The first event of a chain has no correlation id: its
    /// own id is the correlation id of the others, and [`Lookup::find`](crate::Lookup::find) finds it.
    pub correlation_id: Option<String>,
    /// Only events received at or after this time.
    pub since: Option<Timestamp>,
    /// Only events received at or before this time.
    pub until: Option<Timestamp>,
    /// The order.
    pub order: Order,
    /// At most this many, from 1 to [`MAX_HISTORY_PAGE`].
    pub limit: usize,
    /// Where to continue: [`HistoryPage::next`] of the page before, of the same query.
    pub cursor: Option<PageCursor>,
}

impl Default for HistoryQuery {
    fn default() -> Self {
        Self {
            tenant: None,
            app: None,
            entity: None,
            types: None,
            correlation_id: None,
            since: None,
            until: None,
            order: Order::Newest,
            limit: 100,
            cursor: None,
        }
    }
}

impl HistoryQuery {
    /// Only of this tenant.
    #[must_use]
    pub fn tenant(mut self, tenant: impl Into<String>) -> Self {
        self.tenant = Some(tenant.into());
        self
    }

    /// Only of this app.
    #[must_use]
    pub fn app(mut self, app: impl Into<String>) -> Self {
        self.app = Some(app.into());
        self
    }

    /// Only about this entity.
    #[must_use]
    pub fn entity(mut self, kind: impl Into<String>, id: impl Into<String>) -> Self {
        self.entity = Some(Entity {
            kind: kind.into(),
            id: id.into(),
        });
        self
    }

    /// Only types that match.
    #[must_use]
    pub fn types(mut self, pattern: Pattern) -> Self {
        self.types = Some(pattern);
        self
    }

    /// Only events that were published with this correlation id.
    #[must_use]
    pub fn correlation_id(mut self, id: impl Into<String>) -> Self {
        self.correlation_id = Some(id.into());
        self
    }

    /// Only events received at or after this time.
    #[must_use]
    pub fn since(mut self, at: Timestamp) -> Self {
        self.since = Some(at);
        self
    }

    /// Only events received at or before this time.
    #[must_use]
    pub fn until(mut self, at: Timestamp) -> Self {
        self.until = Some(at);
        self
    }

    /// Sets the order.
    #[must_use]
    pub fn order(mut self, order: Order) -> Self {
        self.order = order;
        self
    }

    /// At most this many.
    #[must_use]
    pub fn limit(mut self, limit: usize) -> Self {
        self.limit = limit;
        self
    }

    /// Where to continue.
    #[must_use]
    pub fn after(mut self, cursor: PageCursor) -> Self {
        self.cursor = Some(cursor);
        self
    }

    /// Refuses invalid queries: an empty page, a range that ends before it starts, a cursor of another
    /// query.
    pub fn validate(&self) -> Result<()> {
        if self.limit == 0 || self.limit > MAX_HISTORY_PAGE {
            return Err(Error::new(
                Code::InvalidSetting,
                format!("a page of {} events", self.limit),
            )
            .hint(format!("the limit is between 1 and {MAX_HISTORY_PAGE}")));
        }
        check_range(self.since, self.until)?;
        self.resume_after().map(drop)
    }

    /// The position of the cursor, if there is one: the page begins after it, in the order of the query. Fails if the
    /// cursor belongs to another query.
    pub fn resume_after(&self) -> Result<Option<Position>> {
        let Some(cursor) = &self.cursor else {
            return Ok(None);
        };
        let (position, filter) = cursor.read()?;
        if filter != self.fingerprint() {
            return Err(Error::new(
                Code::InvalidCursor,
                format!("the cursor {cursor} belongs to another query"),
            )
            .hint("use a cursor with the filters and the order of the page it came with"));
        }
        Ok(Some(position))
    }

    /// The cursor after an event of this query.
    pub fn cursor_after(&self, position: Position) -> PageCursor {
        let (shard, place, filter) = (position.shard(), position.place(), self.fingerprint());
        PageCursor(match shard {
            Shard::ONLY => format!("{place:x}-{filter:08x}"),
            shard => format!("{}:{place:x}-{filter:08x}", shard.name()),
        })
    }

    /// Whether an event matches the filters. Its position and time are not compared.
    pub fn matches(&self, event: &Event) -> bool {
        let a = event.attributes();
        let same = |wanted: &Option<String>, found: Option<&String>| {
            wanted.as_ref().is_none_or(|wanted| found == Some(wanted))
        };
        same(&self.tenant, a.and_then(|a| a.tenant.as_ref()))
            && same(&self.app, a.and_then(|a| a.app.as_ref()))
            && same(
                &self.correlation_id,
                a.and_then(|a| a.correlation_id.as_ref()),
            )
            && self
                .entity
                .as_ref()
                .is_none_or(|entity| a.and_then(|a| a.entity.as_ref()) == Some(entity))
            && self
                .types
                .as_ref()
                .is_none_or(|types| types.matches(event.event_type()))
    }

    /// A hash of the filters and the order; limits and cursors do not matter.
    fn fingerprint(&self) -> u32 {
        let mut hash = Fnv::new();
        let entity = self.entity.as_ref();
        hash.text(self.tenant.as_deref());
        hash.text(self.app.as_deref());
        hash.text(entity.map(|e| e.kind.as_str()));
        hash.text(entity.map(|e| e.id.as_str()));
        hash.text(self.types.as_ref().map(Pattern::as_str));
        if let Some(id) = &self.correlation_id {
            // Only hashed if it is set, so that older cursors of queries without it stay valid.
            hash.text(Some(id));
        }
        for time in [self.since, self.until] {
            hash.text(time.map(|t| t.as_micros().to_string()).as_deref());
        }
        hash.text(Some(match self.order {
            Order::Newest => "newest",
            Order::Oldest => "oldest",
        }));
        hash.0
    }
}

/// Refuses a range of time that ends before it starts.
pub fn check_range(since: Option<Timestamp>, until: Option<Timestamp>) -> Result<()> {
    match (since, until) {
        (Some(since), Some(until)) if until < since => Err(Error::new(
            Code::InvalidSetting,
            format!("the range ends at {until}, before it starts at {since}"),
        )
        .hint("give the earlier time to since and the later one to until")),
        _ => Ok(()),
    }
}

/// The end of a page and the start of the next. Its text is specific to the store; it stays valid for the
/// life of the file, even if its event is removed.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PageCursor(String);

impl PageCursor {
    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    fn read(&self) -> Result<(Position, u32)> {
        let parts = self.0.rsplit_once('-').and_then(|(position, filter)| {
            let position = match position.rsplit_once(':') {
                None => Position::seq(hex(position, 16)?),
                Some((shard, place)) => Position::new(Shard::named(shard).ok()?, hex(place, 16)?),
            };
            Some((position, u32::try_from(hex(filter, 8)?).ok()?))
        });
        parts.ok_or_else(|| {
            Error::new(Code::InvalidCursor, format!("{:?} is not a cursor", self.0))
                .hint("use the cursor as it was printed with a page, or none for the first page")
        })
    }
}

fn hex(text: &str, digits: usize) -> Option<u64> {
    let valid = !text.is_empty()
        && text.len() <= digits
        && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
    valid.then(|| u64::from_str_radix(text, 16).ok()).flatten()
}

impl fmt::Display for PageCursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for PageCursor {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self> {
        let cursor = Self(s.to_owned());
        cursor.read()?;
        Ok(cursor)
    }
}

impl Serialize for PageCursor {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0)
    }
}

/// One page of a history.
#[derive(Clone, Debug, Serialize)]
pub struct HistoryPage {
    /// The events.
    pub items: Vec<Arc<Recorded>>,
    /// Where the next page begins, if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next: Option<PageCursor>,
    /// How the store ran the query, as text: which indexes, or a scan.
    pub plan: String,
}

/// A store that answers history queries.
pub trait History: Send + Sync + 'static {
    /// One page of the matching events. A page has fewer events than the limit if there are no more
    /// ([`HistoryPage::next`] is `None`), or if the events are large ([`MAX_HISTORY_BYTES`]).
    fn query(&self, query: HistoryQuery) -> BoxFuture<'_, Result<HistoryPage>>;

    /// How many events match a query in total, without its limit and cursor, counted up to `limit`.
    fn count(&self, query: HistoryQuery, limit: u64) -> BoxFuture<'_, Result<u64>>;

    /// Whether a query by [`HistoryQuery::correlation_id`] is fast, because there is an index for it. Without an index,
    /// the whole log is read.
    fn indexes_correlations(&self) -> bool {
        false
    }
}

/// Fowler–Noll–Vo, 32 bits: enough to detect a cursor of another query.
struct Fnv(u32);

impl Fnv {
    fn new() -> Self {
        Self(0x811c_9dc5)
    }

    fn byte(&mut self, byte: u8) {
        self.0 = (self.0 ^ u32::from(byte)).wrapping_mul(0x0100_0193);
    }

    fn text(&mut self, text: Option<&str>) {
        self.byte(u8::from(text.is_some()));
        let text = text.unwrap_or_default();
        for byte in (text.len() as u64).to_le_bytes() {
            self.byte(byte);
        }
        text.bytes().for_each(|byte| self.byte(byte));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // conformance: memory/bad-cursor: a malformed cursor, or one of another query, is a clear error
    #[test]
    fn a_cursor_goes_with_its_query_only() {
        let query = HistoryQuery::default().tenant("a").limit(5);
        let cursor = query.cursor_after(Position::seq(77));
        let again: PageCursor = cursor.to_string().parse().unwrap();
        let resumed = query.clone().after(again.clone()).limit(9);
        assert_eq!(resumed.resume_after().unwrap(), Some(Position::seq(77)));
        let shard = Position::new(Shard::named("orders-eu:p/1").unwrap(), 77);
        let cursor = query.cursor_after(shard).to_string().parse().unwrap();
        let resumed = query.clone().after(cursor);
        assert_eq!(resumed.resume_after().unwrap(), Some(shard));
        for other in [
            HistoryQuery::default().tenant("b"),
            HistoryQuery::default().app("a"),
            HistoryQuery::default().tenant("a").correlation_id("r"),
            HistoryQuery::default().tenant("a").order(Order::Oldest),
            HistoryQuery::default().tenant("a").since(Timestamp::EPOCH),
        ] {
            let error = other.after(again.clone()).validate().unwrap_err();
            assert_eq!(error.code(), Code::InvalidCursor);
        }
        for bad in [
            "",
            "-",
            "4d",
            "4d-",
            "-00000000",
            "4d-zz",
            "4D-00000000",
            "4d-000000000",
            "11112222333344445-00000000",
            "4d-0-0",
            "é-1",
        ] {
            let error = bad.parse::<PageCursor>().unwrap_err();
            assert_eq!(error.code(), Code::InvalidCursor, "{bad:?}");
        }
    }

    // conformance: memory/bad-range: a range that ends before it starts is a clear error
    #[test]
    fn a_range_that_ends_before_it_starts_is_refused() {
        let (early, late) = (Timestamp::EPOCH, Timestamp::from_micros(1));
        let query = HistoryQuery::default();
        assert!(query.clone().since(early).until(early).validate().is_ok());
        let error = query.since(late).until(early).validate().unwrap_err();
        assert_eq!(error.code(), Code::InvalidSetting);
        assert!(error.to_string().contains("before it starts"), "{error}");
    }

    #[test]
    fn a_page_has_a_size() {
        for (limit, ok) in [(0, false), (1, true), (10_000, true), (10_001, false)] {
            let query = HistoryQuery::default().limit(limit);
            assert_eq!(query.validate().is_ok(), ok, "{limit}");
        }
    }
}
