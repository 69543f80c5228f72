//! Who reads standard output: whether there is still somebody, and what they have taken.

use std::io::{self, IsTerminal as _};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FileType, fstat};

/// How often a reader is looked at that may leave while there is nothing to write.
const LOOK: Duration = Duration::from_millis(200);
/// How often a reader is looked at that has something to take, once it has not taken it at once.
const GLANCE: Duration = Duration::from_millis(1);
/// How long "at once" is: a reader that waits is awake within this time, long before a timer fires.
const AT_ONCE: Duration = Duration::from_micros(300);

/// Whether standard output is a pipe or a socket, so that what is written may never be read.
pub(crate) fn may_leave() -> bool {
    let stdout = io::stdout();
    !stdout.is_terminal()
        && fstat(&stdout).is_ok_and(|stat| {
            matches!(
                FileType::from_raw_mode(stat.st_mode),
                FileType::Fifo | FileType::Socket
            )
        })
}

/// Whether nobody reads standard output any more.
pub(crate) fn is_gone() -> bool {
    let stdout = io::stdout();
    let mut watched = [PollFd::new(&stdout, PollFlags::empty())];
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    let gone = PollFlags::ERR | PollFlags::HUP | PollFlags::NVAL;
    poll(&mut watched, Some(&now)).is_ok() && watched[0].revents().intersects(gone)
}

/// Resolves once nobody reads standard output any more.
pub(crate) async fn gone() {
    while !is_gone() {
        tokio::time::sleep(LOOK).await;
    }
}

/// Resolves once the reader has taken everything that was written, and says whether there is still
/// somebody to have done so.
pub(crate) async fn has_taken_all() -> bool {
    let began = Instant::now();
    loop {
        // In this order: what was taken stays taken, also if the reader left then.
        let unread = rustix::io::ioctl_fionread(io::stdout()).unwrap_or(0);
        if unread == 0 {
            return true;
        }
        if is_gone() {
            return false;
        }
        if began.elapsed() < AT_ONCE {
            std::thread::yield_now();
        } else {
            tokio::time::sleep(GLANCE).await;
        }
    }
}
