//! The settings that all subscriptions of a group must agree on. Subscriptions may differ in retry policy
//! and timeout, but not in the start position of the group, its order, or its concurrency.

use std::collections::BTreeSet;

use everbus_core::{Code, Error, GroupName, Result, StartFrom};

use crate::runtime::options::DEFAULT_CONCURRENCY;

/// The settings that the subscriptions of a group have agreed on so far, and which subscription set them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Agreed {
    names: BTreeSet<String>,
    founded: Option<Founded>,
    /// The concurrency, and the first subscription that set it.
    concurrency: Option<(usize, String)>,
}

/// The settings of the first subscription, which all others must agree with.
#[derive(Clone, Debug)]
struct Founded {
    start_from: StartFrom,
    ordered: bool,
    ephemeral: bool,
    by: String,
}

/// What a subscription asks of its group.
pub(crate) struct Asked<'a> {
    pub(crate) group: &'a GroupName,
    pub(crate) name: Option<&'a str>,
    pub(crate) pattern: &'a str,
    pub(crate) start_from: Option<StartFrom>,
    pub(crate) ordered: Option<bool>,
    pub(crate) ephemeral: Option<bool>,
    pub(crate) concurrency: Option<usize>,
}

impl Agreed {
    /// Adds a subscription; fails if its settings contradict those of the group. Returns its name: the given
    /// one, or else the pattern, with a number if the group has that name already.
    pub(crate) fn join(&mut self, asked: &Asked<'_>) -> Result<String> {
        let name = self.choose_name(asked)?;
        match &self.founded {
            Some(founded) => self.agrees(founded, asked, &name)?,
            None => {
                self.founded = Some(Founded {
                    start_from: asked.start_from.unwrap_or(default_start(asked.group)),
                    ordered: asked.ordered.unwrap_or(false),
                    ephemeral: asked.ephemeral.unwrap_or(false),
                    by: name.clone(),
                });
            }
        }
        if let Some(number) = asked.concurrency {
            self.concurrency.get_or_insert((number, name.clone()));
        }
        self.names.insert(name.clone());
        Ok(name)
    }

    /// Removes a subscription. After the last one, the group has no agreed settings.
    pub(crate) fn leave(&mut self, name: &str) {
        self.names.remove(name);
        if self.names.is_empty() {
            *self = Self::default();
        }
    }

    pub(crate) fn start_from(&self, group: &GroupName) -> StartFrom {
        let founded = self.founded.as_ref();
        founded.map_or_else(|| default_start(group), |founded| founded.start_from)
    }

    pub(crate) fn is_ordered(&self) -> bool {
        self.founded.as_ref().is_some_and(|founded| founded.ordered)
    }

    pub(crate) fn is_ephemeral(&self) -> bool {
        let founded = self.founded.as_ref();
        founded.is_some_and(|founded| founded.ephemeral)
    }

    pub(crate) fn concurrency(&self) -> usize {
        let asked = self.concurrency.as_ref();
        asked.map_or(DEFAULT_CONCURRENCY, |(number, _)| *number)
    }

    fn choose_name(&self, asked: &Asked<'_>) -> Result<String> {
        match asked.name {
            Some(name) if self.names.contains(name) => Err(Error::new(
                Code::GroupConflict,
                format!(
                    "the group {} already has a subscription named {name:?}",
                    asked.group
                ),
            )
            .hint("names are unique in a group; leave the name out to have one chosen")),
            Some(name) => Ok(name.to_owned()),
            None => {
                let mut name = asked.pattern.to_owned();
                let mut number = 2;
                while self.names.contains(&name) {
                    name = format!("{}#{number}", asked.pattern);
                    number += 1;
                }
                Ok(name)
            }
        }
    }

    fn agrees(&self, founded: &Founded, asked: &Asked<'_>, name: &str) -> Result<()> {
        let conflict = |what: String| {
            Err(Error::new(
                Code::GroupConflict,
                format!("in the group {}, {what}", asked.group),
            )
            .hint("say it the same way in both subscriptions, or in the first one only"))
        };
        let Founded {
            start_from,
            ordered,
            ephemeral,
            by,
        } = founded;
        if let Some(from) = asked.start_from
            && from != *start_from
        {
            return conflict(format!(
                "{by:?} starts from {start_from:?} and {name:?} from {from:?}"
            ));
        }
        if let Some(wants) = asked.ordered
            && wants != *ordered
        {
            let (one, other) = if wants {
                (by.as_str(), name)
            } else {
                (name, by.as_str())
            };
            return conflict(format!("{one:?} is not ordered and {other:?} is"));
        }
        if asked.ephemeral.is_some_and(|wants| wants && !ephemeral) {
            return conflict(format!("{by:?} lasts and {name:?} is ephemeral"));
        }
        if let (Some(number), Some((agreed, by))) = (asked.concurrency, &self.concurrency)
            && number != *agreed
        {
            return conflict(format!(
                "{by:?} asks for a concurrency of {agreed} and {name:?} for {number}"
            ));
        }
        Ok(())
    }
}

fn default_start(group: &GroupName) -> StartFrom {
    if group.is_unnamed() {
        StartFrom::First
    } else {
        StartFrom::New
    }
}
