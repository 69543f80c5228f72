//! A disk whose power can be cut: an ext4 file system in a file, mounted through a loop device.
//!
//! `EXT4_IOC_SHUTDOWN` without a log flush stops the file system at once: data that was not synced is gone at
//! the next mount, as after a power loss. A kill cannot show that, since the page cache survives it.
//!
//! The call needs `ioctl`, which safe Rust does not offer, so a small Python process makes it. That process
//! also cleans up when its standard input closes, so nothing stays mounted however this process ends.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use super::Broken;

const SIZE: u64 = 256 << 20;

const SWITCH: &str = r#"
import fcntl, os, shutil, signal, struct, subprocess, sys, time
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
mount, directory = sys.argv[1:3]
print("ready", flush=True)
for line in sys.stdin:
    try:
        root = os.open(mount, os.O_RDONLY)
        fcntl.ioctl(root, 0x8004587D, struct.pack("I", 2))
        os.close(root)
        print("off", flush=True)
    except OSError as error:
        print(error, flush=True)
def mounted():
    with open("/proc/self/mounts") as mounts:
        return any(line.split()[1] == mount for line in mounts)
for tries in range(100):
    if not mounted():
        break
    lazy = ["--lazy"] if tries > 80 else []
    subprocess.run(["umount", *lazy, mount], stderr=subprocess.DEVNULL)
    time.sleep(0.05 if mounted() else 0)
shutil.rmtree(directory, ignore_errors=True)
"#;

/// A mounted disk. Dropping it unmounts and removes it.
pub struct Disk {
    image: PathBuf,
    mount: PathBuf,
    switch: Child,
    to_switch: Option<ChildStdin>,
    from_switch: BufReader<ChildStdout>,
}

impl Disk {
    /// Why this machine cannot simulate a power loss; `None` if it can.
    pub fn missing() -> Option<String> {
        if !cfg!(target_os = "linux") {
            return Some("Linux, whose ext4 can be shut down".into());
        }
        if !rustix::process::geteuid().is_root() {
            return Some("root, to mount a file system".into());
        }
        if !Path::new("/dev/loop-control").exists() {
            return Some("loop devices".into());
        }
        for (program, probe) in [
            ("mkfs.ext4", "-V"),
            ("mount", "--version"),
            ("umount", "--version"),
            ("python3", "--version"),
        ] {
            if run(program, &[probe.as_ref()]).is_err() {
                return Some(program.into());
            }
        }
        let tried = Self::create().and_then(|mut disk| disk.lose_power());
        tried
            .err()
            .map(|error| format!("a file system to shut down ({error})"))
    }

    /// Makes, formats and mounts a new disk.
    pub fn create() -> Result<Self, Broken> {
        let directory = tempfile::Builder::new()
            .prefix("everbus-power-")
            .tempdir()
            .map_err(Broken::at("making a directory"))?;
        let (image, mount) = (
            directory.path().join("disk"),
            directory.path().join("mount"),
        );
        std::fs::create_dir(&mount).map_err(Broken::at("making a directory"))?;
        std::fs::File::create(&image)
            .and_then(|file| file.set_len(SIZE))
            .map_err(Broken::at("making an image"))?;
        let mut switch = Command::new("python3")
            .args(["-c", SWITCH])
            .arg(&mount)
            .arg(directory.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(Broken::at("starting python3"))?;
        // From here on the Python process removes everything.
        let _ = directory.keep();
        let (to_switch, from_switch) = (switch.stdin.take(), switch.stdout.take());
        let from_switch = from_switch.ok_or_else(|| Broken::new("python3 has no output"))?;
        let mut disk = Self {
            image,
            mount,
            switch,
            to_switch,
            from_switch: BufReader::new(from_switch),
        };
        disk.hear("ready")?;
        disk.format()?;
        disk.mount()?;
        Ok(disk)
    }

    /// Where files go.
    pub fn path(&self) -> &Path {
        &self.mount
    }

    /// Cuts the power: data that was not synced is gone.
    pub fn lose_power(&mut self) -> Result<(), Broken> {
        let switch = self.to_switch.as_mut();
        let switch = switch.ok_or_else(|| Broken::new("the switch is gone"))?;
        switch
            .write_all(b"off\n")
            .map_err(Broken::at("cutting the power"))?;
        self.hear("off")
    }

    fn hear(&mut self, expected: &str) -> Result<(), Broken> {
        let mut answer = String::new();
        self.from_switch
            .read_line(&mut answer)
            .map_err(Broken::at("listening to python3"))?;
        match answer.trim() {
            heard if heard == expected => Ok(()),
            other => Err(Broken(format!(
                "the switch says {other:?}, not {expected:?}"
            ))),
        }
    }

    /// Brings the file system back after a power loss: the journal is replayed.
    pub fn restore_power(&mut self) -> Result<(), Broken> {
        self.unmount()?;
        self.mount()
    }

    /// Begins with an empty file system.
    pub fn replace(&mut self) -> Result<(), Broken> {
        self.unmount()?;
        self.format()?;
        self.mount()
    }

    fn format(&self) -> Result<(), Broken> {
        run("mkfs.ext4", &["-q".as_ref(), "-F".as_ref(), &self.image])
    }

    fn mount(&self) -> Result<(), Broken> {
        let options = ["-o".as_ref(), "loop".as_ref()];
        run("mount", &[options[0], options[1], &self.image, &self.mount])
    }

    fn unmount(&self) -> Result<(), Broken> {
        let mut tries = 0;
        loop {
            match run("umount", &[&self.mount]) {
                // The kernel may need a moment to close the files of a dead process.
                Err(_) if tries < 1500 => std::thread::sleep(Duration::from_millis(20)),
                result => return result,
            }
            tries += 1;
        }
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        drop(self.to_switch.take());
        let _ = self.switch.wait();
    }
}

fn run(program: &str, arguments: &[&Path]) -> Result<(), Broken> {
    let output = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .map_err(Broken::at(program))?;
    if output.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&output.stderr);
    Err(Broken(format!("{program}: {}", text.trim())))
}
