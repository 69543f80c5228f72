//! A small client of HTTP/1.1 on one connection that stays open.

use std::net::SocketAddr;

use bytes::BytesMut;
use everbus_core::Result;
use memchr::memmem;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::failed;
use crate::sample::wrong;

const LENGTH: &[u8] = b"content-length:";
/// The first size of the read buffer.
const ROOM: usize = 8 * 1024;

pub(super) struct Client {
    pub(super) stream: TcpStream,
    pub(super) bytes: BytesMut,
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
            bytes: BytesMut::with_capacity(ROOM),
        })
    }

    /// Sends a request, which must be answered with this status. Returns the body.
    pub(super) async fn expect(&mut self, request: &[u8], status: u16) -> Result<BytesMut> {
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

    pub(super) async fn get(&mut self, path: &str) -> Result<BytesMut> {
        self.expect(&request("GET", path, "text/plain", b""), 200)
            .await
    }

    /// The head of the next answer.
    pub(super) async fn head(&mut self) -> Result<BytesMut> {
        let end = loop {
            if let Some(end) = memmem::find(&self.bytes, b"\r\n\r\n") {
                break end;
            }
            self.more().await?;
        };
        Ok(self.bytes.split_to(end + 4))
    }

    async fn answer(&mut self) -> Result<(u16, BytesMut)> {
        let head = self.head().await?;
        let wrong = |what: &str| wrong(format!("{what}: {}", String::from_utf8_lossy(&head)));
        let number = |digits: &[u8]| std::str::from_utf8(digits).ok()?.trim().parse().ok();
        let status = head.get(9..12).and_then(number);
        let status = status.ok_or_else(|| wrong("not an answer"))?;
        let status = u16::try_from(status).map_err(|_| wrong("not an answer"))?;
        let length = head[..].split(|b| *b == b'\n').find_map(|line| {
            let (name, value) = line.split_at_checked(LENGTH.len())?;
            name.eq_ignore_ascii_case(LENGTH).then(|| number(value))?
        });
        let length: usize = length.ok_or_else(|| wrong("no length"))?;
        while self.bytes.len() < length {
            self.more().await?;
        }
        Ok((status, self.bytes.split_to(length)))
    }

    /// Reads the next bytes.
    pub(super) async fn more(&mut self) -> Result<()> {
        let read = self.stream.read_buf(&mut self.bytes).await;
        match read.map_err(failed)? {
            0 => Err(wrong("the server closed the connection")),
            _ => Ok(()),
        }
    }
}
