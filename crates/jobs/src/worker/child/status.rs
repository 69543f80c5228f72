//! The memory use of a process, from `/proc`. It is unknown on systems without `/proc`.

use rustix::process::Pid;

/// The memory of a process, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Memory {
    pub(super) resident: u64,
    pub(super) peak: u64,
}

impl Memory {
    /// Reads the memory of a process. `None` if the process has ended, or without `/proc`.
    pub(super) fn of(pid: Pid) -> Option<Self> {
        let path = format!("/proc/{}/status", pid.as_raw_nonzero());
        Self::parse(&std::fs::read_to_string(path).ok()?)
    }

    fn parse(status: &str) -> Option<Self> {
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name))?;
            let kilobytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
            Some(kilobytes * 1024)
        };
        Some(Self {
            resident: field("VmRSS:")?,
            peak: field("VmHWM:")?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fields_of_a_status_file() {
        let status = "Name:\tpython3\nVmHWM:\t   10240 kB\nVmRSS:\t    2048 kB\nThreads:\t1\n";
        let memory = Memory::parse(status).unwrap();
        assert_eq!((memory.resident, memory.peak), (2_097_152, 10_485_760));
        // A process that has ended has no memory.
        assert_eq!(Memory::parse("Name:\tpython3\nState:\tZ (zombie)\n"), None);
    }
}
