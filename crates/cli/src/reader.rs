//! The reader of standard output: whether it is still there, and what it has taken.

use std::io::{self, IsTerminal as _};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FileType, fstat};

/// How often to check for a reader that leaves while there is nothing to write.
const LOOK: Duration = Duration::from_millis(200);
/// How often to check a slow reader that has something to take.
const GLANCE: Duration = Duration::from_millis(1);
/// For this long, the reader is checked without a pause: a waiting reader wakes up sooner than a timer fires.
const AT_ONCE: Duration = Duration::from_micros(300);

/// Whether standard output is a pipe or a socket, whose reader may never read what is written.
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

/// Whether the reader of standard output is gone.
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

/// Resolves once the reader of standard output is gone.
pub(crate) async fn gone() {
    while !is_gone() {
        tokio::time::sleep(LOOK).await;
    }
}

/// Resolves once the reader has taken everything that was written, or is gone. Returns whether it is still
/// there.
pub(crate) async fn has_taken_all() -> bool {
    let began = Instant::now();
    loop {
        // In this order: data that was taken counts, even if the reader left afterwards.
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
