//! The condition of a statement with its values, built from a filter.

use crate::pool::Param;

/// Terms that are joined by AND, with their values.
#[derive(Default)]
pub(crate) struct Condition {
    terms: Vec<String>,
    values: Vec<Box<dyn Param + Send>>,
}

impl Condition {
    /// Adds a term without a value.
    pub(crate) fn term(&mut self, term: impl Into<String>) {
        self.terms.push(term.into());
    }

    /// Adds a value. Returns its name in the statement.
    pub(crate) fn value(&mut self, value: impl Param + Send + 'static) -> String {
        self.values.push(Box::new(value));
        format!("${}", self.values.len())
    }

    /// Adds a term; `?` stands for the value.
    pub(crate) fn and(&mut self, term: &str, value: impl Param + Send + 'static) {
        let name = self.value(value);
        self.terms.push(term.replace('?', &name));
    }

    pub(crate) fn sql(&self) -> String {
        if self.terms.is_empty() {
            return "true".into();
        }
        self.terms.join(" AND ")
    }

    pub(crate) fn params(&self) -> Vec<&dyn Param> {
        self.values
            .iter()
            .map(|value| &**value as &dyn Param)
            .collect()
    }
}
