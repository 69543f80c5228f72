//! The bus on every embedded engine: the checklist of the specification, line by line.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stderr)]

mod config;
mod dead_letters;
mod dispatch;
mod faults;
mod faulty;
mod logs;
mod panics;
mod publish;
mod retention;
mod retry;
mod shutdown;
mod subscribe;
mod support;
mod typed;
