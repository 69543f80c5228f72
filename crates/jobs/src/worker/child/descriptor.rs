//! A file descriptor of its own for the output of a child, so that standard output is free for other things.

use std::io;
use std::os::fd::AsRawFd as _;
use std::process::{Child, Command};

use parking_lot::RwLock;
use rustix::io::FdFlags;
use tokio::net::unix::pipe::Receiver;

use super::collect::OutputKind;

/// The variable with the number of the descriptor.
pub(super) const VARIABLE: &str = "EVERBUS_OUTPUT_FD";

/// A descriptor that a child inherits can be inherited by every child that is started at that moment. Such a child is
/// started while no other is.
static STARTING: RwLock<()> = RwLock::new(());

/// Starts a child, with a pipe for its output if it is to have one.
pub(super) fn spawn(
    command: &mut Command,
    kind: OutputKind,
) -> io::Result<(Child, Option<Receiver>)> {
    if kind != OutputKind::Descriptor {
        let _others_too = STARTING.read();
        return Ok((command.spawn()?, None));
    }
    let (reader, writer) = io::pipe()?;
    let reader = Receiver::from_owned_fd(reader.into())?;
    command.env(VARIABLE, writer.as_raw_fd().to_string());
    let alone = STARTING.write();
    rustix::io::fcntl_setfd(&writer, FdFlags::empty())?;
    let child = command.spawn();
    // The child has its own; this process must not pass on a second one.
    drop(writer);
    drop(alone);
    Ok((child?, Some(reader)))
}
