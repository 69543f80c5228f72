//! A small client of HTTP/1.1 on one connection that stays open.

use std::net::SocketAddr;

use everbus_core::Result;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::failed;
use crate::sample::wrong;

pub(super) struct Client {
    pub(super) stream: TcpStream,
    pub(super) bytes: Vec<u8>,
}

/// A request, ready to be sent.
pub(super) fn request(method: &str, path: &str, kind: &str, body: &[u8]) -> Vec<u8> {
    let length = body.len();
    let mut request = format!(
        "{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: {kind}\r\ncontent-length: {length}\r\n\r\n"
    )
    .into_bytes();
    request.extend_from_slice(body);
    request
}

impl Client {
    pub(super) async fn connect(address: SocketAddr) -> Result<Self> {
        let stream = TcpStream::connect(address).await.map_err(failed)?;
        stream.set_nodelay(true).map_err(failed)?;
        Ok(Self {
            stream,
            bytes: Vec::new(),
        })
    }

    /// Sends a request, which must be answered with this status. Returns the body.
    pub(super) async fn expect(&mut self, request: &[u8], status: u16) -> Result<Vec<u8>> {
        self.stream.write_all(request).await.map_err(failed)?;
        let (got, body) = self.answer().await?;
        match got == status {
            true => Ok(body),
            false => Err(wrong(format!(
                "the server answered {got}: {}",
                String::from_utf8_lossy(&body)
            ))),
        }
    }

    /// Gets a page.
    pub(super) async fn get(&mut self, path: &str) -> Result<Vec<u8>> {
        self.expect(&request("GET", path, "text/plain", b""), 200)
            .await
    }

    /// The head of the next answer.
    pub(super) async fn head(&mut self) -> Result<String> {
        let end = loop {
            let found = self.bytes.windows(4).position(|w| w == b"\r\n\r\n");
            if let Some(end) = found {
                break end;
            }
            self.more().await?;
        };
        let head = String::from_utf8_lossy(&self.bytes[..end]).to_ascii_lowercase();
        self.bytes.drain(..end + 4);
        Ok(head)
    }

    async fn answer(&mut self) -> Result<(u16, Vec<u8>)> {
        let head = self.head().await?;
        let status = head.get(9..12).and_then(|status| status.parse().ok());
        let status = status.ok_or_else(|| wrong(format!("not an answer: {head}")))?;
        let length = head.split("\r\ncontent-length: ").nth(1);
        let length = length.and_then(|text| text.lines().next()?.trim().parse().ok());
        let length: usize = length.ok_or_else(|| wrong(format!("no length: {head}")))?;
        while self.bytes.len() < length {
            self.more().await?;
        }
        Ok((status, self.bytes.drain(..length).collect()))
    }

    /// Reads what has come.
    pub(super) async fn more(&mut self) -> Result<()> {
        let read = self.stream.read_buf(&mut self.bytes).await;
        match read.map_err(failed)? {
            0 => Err(wrong("the server closed the connection")),
            _ => Ok(()),
        }
    }
}
