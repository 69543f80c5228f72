//! Lets the derive macro find out whether a type has a schema, without requiring one.
//!
//! The derive calls `(&SchemaOf::<T>::NEW).json_schema()`. Method look-up tries the value before a
//! reference to it, so [`KnownSchema`] answers for a type that implements `JsonSchema`, and
//! [`NoSchema`] for any other.

use std::marker::PhantomData;

#[cfg(feature = "schema")]
use schemars::{JsonSchema, generate::SchemaSettings};
use serde_json::Value;

/// Stands for the type in question.
#[derive(Debug)]
pub struct SchemaOf<T>(PhantomData<T>);

impl<T> SchemaOf<T> {
    /// The only value.
    pub const NEW: Self = Self(PhantomData);
}

/// The answer for types that derive `JsonSchema`.
pub trait KnownSchema {
    /// The schema of the deserialised form, as draft 7: the draft that AsyncAPI tools understand.
    fn json_schema(&self) -> Option<Value>;
}

#[cfg(feature = "schema")]
impl<T: JsonSchema> KnownSchema for SchemaOf<T> {
    fn json_schema(&self) -> Option<Value> {
        let generator = SchemaSettings::draft07().into_generator();
        Some(generator.into_root_schema_for::<T>().to_value())
    }
}

/// The answer for all other types.
pub trait NoSchema {
    /// None.
    fn json_schema(&self) -> Option<Value> {
        None
    }
}

impl<T> NoSchema for &SchemaOf<T> {}
