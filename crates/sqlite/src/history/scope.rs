//! The keys of postings: the hash of one of eight combinations of names, or of a correlation id.
//!
//! The hashes are in the file, so this arithmetic must never change. Two combinations with the same hash are
//! harmless: every event that is found is compared with the query.

use std::borrow::Cow;

use everbus_core::Entity;
use serde::Deserialize;

/// Hashes keep this many bits: collisions stay rare, and differences of neighbours short.
const BITS: u32 = 48;

/// The names of an event, read from its stored attributes.
#[derive(Default, Deserialize)]
pub(crate) struct Named<'a> {
    #[serde(borrow, default)]
    pub(crate) tenant: Option<Text<'a>>,
    #[serde(borrow, default)]
    pub(crate) app: Option<Text<'a>>,
    #[serde(borrow, default)]
    pub(crate) entity: Option<NamedEntity<'a>>,
    #[serde(borrow, default)]
    pub(crate) correlation_id: Option<Text<'a>>,
}

/// A text that is copied only if necessary.
#[derive(Deserialize)]
#[serde(transparent)]
pub(crate) struct Text<'a>(#[serde(borrow)] pub(crate) Cow<'a, str>);

/// The entity as stored.
#[derive(Deserialize)]
pub(crate) struct NamedEntity<'a> {
    #[serde(rename = "type", borrow)]
    pub(crate) kind: Cow<'a, str>,
    #[serde(borrow)]
    pub(crate) id: Cow<'a, str>,
}

impl NamedEntity<'_> {
    pub(crate) fn is(&self, entity: &Entity) -> bool {
        self.kind == entity.kind && self.id == entity.id
    }
}

/// The eight combinations of the *workflow* specification, and the correlation id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Tenant = 1,
    Entity = 2,
    App = 3,
    AppEntity = 4,
    TypeTenant = 5,
    TypeTenantEntity = 6,
    TypeTenantApp = 7,
    All = 8,
    Correlation = 9,
}

impl Kind {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Tenant => "tenant",
            Self::Entity => "entity",
            Self::App => "app",
            Self::AppEntity => "app+entity",
            Self::TypeTenant => "type+tenant",
            Self::TypeTenantEntity => "type+tenant+entity",
            Self::TypeTenantApp => "type+tenant+app",
            Self::All => "type+tenant+app+entity",
            Self::Correlation => "correlation",
        }
    }
}

/// The hashes of the names that an event or a query has.
#[derive(Clone, Copy, Default)]
pub(crate) struct Hashes {
    pub(crate) tenant: Option<u64>,
    pub(crate) app: Option<u64>,
    pub(crate) entity: Option<u64>,
    pub(crate) event_type: Option<u64>,
    pub(crate) correlation: Option<u64>,
}

impl Hashes {
    /// The scope of a combination, if all of its names are present.
    pub(crate) fn scope(&self, kind: Kind) -> Option<i64> {
        let parts = match kind {
            Kind::Tenant => [self.tenant, None, None, None],
            Kind::Entity => [self.entity, None, None, None],
            Kind::App => [self.app, None, None, None],
            Kind::Correlation => [self.correlation, None, None, None],
            Kind::AppEntity => [Some(self.app?), Some(self.entity?), None, None],
            Kind::TypeTenant => [Some(self.event_type?), Some(self.tenant?), None, None],
            Kind::TypeTenantEntity => [
                Some(self.event_type?),
                Some(self.tenant?),
                Some(self.entity?),
                None,
            ],
            Kind::TypeTenantApp => [
                Some(self.event_type?),
                Some(self.tenant?),
                Some(self.app?),
                None,
            ],
            Kind::All => [
                Some(self.event_type?),
                Some(self.tenant?),
                Some(self.app?),
                Some(self.entity?),
            ],
        };
        parts[0]?;
        let hash = parts
            .into_iter()
            .flatten()
            .fold(kind as u64, |hash, part| mix(hash.rotate_left(23) ^ part));
        i64::try_from(hash >> (64 - BITS)).ok()
    }

    /// Every scope that an event with these names belongs to.
    pub(crate) fn scopes(&self) -> impl Iterator<Item = i64> + '_ {
        const KINDS: [Kind; 9] = [
            Kind::Tenant,
            Kind::Entity,
            Kind::App,
            Kind::AppEntity,
            Kind::TypeTenant,
            Kind::TypeTenantEntity,
            Kind::TypeTenantApp,
            Kind::All,
            Kind::Correlation,
        ];
        KINDS.into_iter().filter_map(|kind| self.scope(kind))
    }
}

/// The hash of a name.
pub(crate) fn name(text: &str) -> u64 {
    mix(bytes(text.len() as u64, text))
}

/// The hash of an entity: its type and id, separated by the length of the type.
pub(crate) fn entity(kind: &str, id: &str) -> u64 {
    mix(bytes(bytes(kind.len() as u64, kind), id))
}

/// Fowler–Noll–Vo, version 1a.
fn bytes(seed: u64, text: &str) -> u64 {
    text.bytes().fold(seed ^ 0xcbf2_9ce4_8422_2325, |hash, b| {
        (hash ^ u64::from(b)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

/// Spreads every bit over all others: the finaliser of MurmurHash3.
fn mix(mut hash: u64) -> u64 {
    hash ^= hash >> 33;
    hash = hash.wrapping_mul(0xff51_afd7_ed55_8ccd);
    hash ^= hash >> 33;
    hash = hash.wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    hash ^ (hash >> 33)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn full() -> Hashes {
        Hashes {
            tenant: Some(name("acme")),
            app: Some(name("shop")),
            entity: Some(entity("TASK", "req-123")),
            event_type: Some(name("Task Completed")),
            correlation: None,
        }
    }

    // conformance: memory/history-bare: an event without tenant, app, entity and correlation id has no entries in the indexes
    #[test]
    fn an_event_has_an_entry_for_each_combination_it_has_the_names_of() {
        let count = |hashes: Hashes| hashes.scopes().collect::<HashSet<_>>().len();
        assert_eq!(count(full()), 8);
        let without = |change: fn(&mut Hashes)| {
            let mut hashes = full();
            change(&mut hashes);
            count(hashes)
        };
        assert_eq!(without(|h| h.app = None), 4);
        assert_eq!(without(|h| h.entity = None), 4);
        assert_eq!(without(|h| h.tenant = None), 3);
        assert_eq!(without(|h| h.correlation = Some(name("req-1"))), 9);
        let bare = Hashes {
            event_type: Some(name("Task Completed")),
            ..Hashes::default()
        };
        assert_eq!(count(bare), 0);
    }

    /// The hashes are in files: a change of the arithmetic would make their indexes useless.
    #[test]
    fn the_hashes_never_change() {
        let scopes: Vec<i64> = full().scopes().collect();
        assert_eq!(
            scopes,
            [
                94_578_881_982_447,
                167_984_519_038_192,
                138_060_946_574_531,
                117_943_245_626_168,
                100_228_413_572_730,
                110_637_127_105_112,
                9_025_665_425_085,
                10_867_362_041_321,
            ],
        );
    }

    #[test]
    fn the_parts_of_an_entity_are_told_apart() {
        assert_ne!(entity("a", "bc"), entity("ab", "c"));
        assert_ne!(name("ab"), entity("a", "b"));
    }
}
