//! Certificates for servers with TLS: an authority of its own, and a certificate for 127.0.0.1 and localhost.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::{program, require};

/// A folder with an authority and the certificate and key of a server, made by `openssl` for one test.
#[derive(Debug)]
pub struct Certificates {
    directory: tempfile::TempDir,
}

impl Certificates {
    /// Makes them. They last for a day.
    pub fn make() -> Option<Self> {
        let openssl = program("openssl", &[]).ok_or_else(|| "it is not installed".to_owned());
        let openssl = require("openssl", "apt-get install openssl", openssl)?;
        let made = Self {
            directory: super::directory("tls"),
        };
        let run = |arguments: &str| {
            let mut command = Command::new(&openssl);
            command.current_dir(made.directory.path());
            let done = command.args(arguments.split(' ')).output().unwrap();
            let said = String::from_utf8_lossy(&done.stderr);
            assert!(done.status.success(), "openssl {arguments}: {said}");
        };
        let key = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes";
        run(&format!(
            "req -x509 {key} -keyout ca.key -out ca.pem -days 1 -subj /CN=authority"
        ));
        run(&format!(
            "req {key} -keyout server.key -out server.csr -subj /CN=localhost"
        ));
        let names = "subjectAltName=DNS:localhost,IP:127.0.0.1\nbasicConstraints=CA:FALSE\n";
        std::fs::write(made.path("names"), names).unwrap();
        run(
            "x509 -req -in server.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 1 -extfile names -out server.pem",
        );
        Some(made)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// The certificate of the authority, which a client trusts.
    pub fn authority(&self) -> PathBuf {
        self.path("ca.pem")
    }

    /// The certificate of the server.
    pub fn certificate(&self) -> PathBuf {
        self.path("server.pem")
    }

    /// The key of the server.
    pub fn key(&self) -> PathBuf {
        self.path("server.key")
    }

    /// The folder with all of them.
    pub fn folder(&self) -> &Path {
        self.directory.path()
    }
}
