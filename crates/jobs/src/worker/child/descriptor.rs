//! A separate file descriptor for the output of a child, so that standard output is free for other text.

use std::io;
use std::os::fd::AsRawFd as _;
use std::process::{Child, Command};

use parking_lot::RwLock;
use rustix::io::FdFlags;
use tokio::net::unix::pipe::Receiver;

use super::collect::OutputKind;

/// The environment variable with the number of the descriptor.
pub(super) const VARIABLE: &str = "EVERBUS_OUTPUT_FD";

/// While a descriptor is inheritable, every child that is started inherits it. So a child with such a descriptor takes
/// the write lock: no other child is started at the same time.
static STARTING: RwLock<()> = RwLock::new(());

/// Starts a child, with a separate pipe for its output if the kind is `Descriptor`.
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
    // The child has its copy. This process closes its own before another child can inherit it.
    drop(writer);
    drop(alone);
    Ok((child?, Some(reader)))
}
