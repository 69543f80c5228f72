//! The names of streams, and the table that says which event types are in which stream.

pub use everbus_core::stream::{OnFull, Stream, StreamLimit, Streams, canonical, label};
