//! The tests of the server, in one binary.

mod api;
mod bad_input;
mod browser;
mod consuming;
mod listening;
mod metrics;
mod publishing;
mod security;
mod served;
mod webdriver;
