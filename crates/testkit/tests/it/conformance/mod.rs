//! The suite on the narrow engine, alone and with a SQLite file beside it.

mod beside;
mod narrow;
