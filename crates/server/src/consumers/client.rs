//! Requests to addresses that others chose: resolved once and pinned, https only, no redirects, no private networks.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::pin::pin;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use everbus::{Code, Error, Result};
use http::{Request, StatusCode, Uri, header};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

/// The answer is read up to this many bytes: only its beginning is shown.
const MOST_BYTES: usize = 64 * 1024;
/// The time for a connection.
const CONNECT: Duration = Duration::from_secs(10);

/// Where requests go.
#[derive(Clone, Debug)]
pub(super) struct Address {
    uri: Uri,
    host: String,
    port: u16,
    tls: bool,
    private: bool,
}

/// What the receiver answered.
pub(super) struct Reply {
    pub(super) status: StatusCode,
    /// In seconds.
    pub(super) retry_after: Option<u64>,
    pub(super) text: String,
}

impl Address {
    /// Checks an address. `private` allows `http:` and private networks.
    pub(super) fn parse(url: &str, private: bool) -> Result<Self> {
        let bad = |what: &str| {
            Error::new(Code::InvalidUrl, format!("the address of a webhook {what}"))
                .hint("it begins with https://; http:// and private addresses need allow_private or server.private_webhooks")
        };
        let uri: Uri = url.parse().map_err(|_| bad("cannot be read"))?;
        let tls = match uri.scheme_str() {
            Some("https") => true,
            Some("http") if private => false,
            _ => return Err(bad("does not begin with https://")),
        };
        let authority = uri.authority().ok_or_else(|| bad("has no host"))?;
        if authority.as_str().contains('@') {
            return Err(bad("has credentials in it"));
        }
        let host = authority.host().trim_matches(['[', ']']).to_owned();
        let port = authority.port_u16().unwrap_or(if tls { 443 } else { 80 });
        if let Ok(ip) = host.parse::<IpAddr>()
            && !private
            && !is_public(ip)
        {
            return Err(bad("is in a private network"));
        }
        Ok(Self {
            uri,
            host,
            port,
            tls,
            private,
        })
    }

    /// Sends a request. The error is a text without secrets.
    pub(super) async fn post(
        &self,
        headers: &[(&'static str, String)],
        body: Bytes,
    ) -> Result<Reply, String> {
        let stream = tokio::time::timeout(CONNECT, self.connect()).await;
        let stream = stream.map_err(|_| format!("{self}: no connection in time"))??;
        if !self.tls {
            return self.exchange(stream, headers, body).await;
        }
        let name = ServerName::try_from(self.host.clone())
            .map_err(|_| format!("{self}: not the name of a server"))?;
        let tls = TlsConnector::from(client_config()?).connect(name, stream);
        let stream = tokio::time::timeout(CONNECT, tls).await;
        let stream = stream
            .map_err(|_| format!("{self}: no TLS in time"))?
            .map_err(|e| format!("{self}: {e}"))?;
        self.exchange(stream, headers, body).await
    }

    /// Resolves the name once, and connects to an address that is allowed: a second look could give another one.
    async fn connect(&self) -> Result<TcpStream, String> {
        let found = tokio::net::lookup_host((self.host.as_str(), self.port)).await;
        let found: Vec<SocketAddr> = found.map_err(|e| format!("{self}: {e}"))?.collect();
        let allowed = found
            .iter()
            .filter(|address| self.private || is_public(address.ip()));
        let mut last = None;
        for address in allowed {
            match TcpStream::connect(address).await {
                Ok(stream) => return Ok(stream),
                Err(error) => last = Some(error),
            }
        }
        Err(match last {
            Some(error) => format!("{self}: {error}"),
            None => format!("{self}: the name stands for no public address"),
        })
    }

    async fn exchange<S>(
        &self,
        stream: S,
        headers: &[(&'static str, String)],
        body: Bytes,
    ) -> Result<Reply, String>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let failed = |e: &dyn fmt::Display| format!("{self}: {e}");
        let handshake = http1::handshake(TokioIo::new(stream)).await;
        let (mut sender, connection) = handshake.map_err(|e| failed(&e))?;
        let path = self.uri.path_and_query().map_or("/", |path| path.as_str());
        let host = self.uri.authority().map_or("", |host| host.as_str());
        let mut request = Request::post(path).header(header::HOST, host).header(
            header::USER_AGENT,
            concat!("everbus/", env!("CARGO_PKG_VERSION")),
        );
        for (name, value) in headers {
            request = request.header(*name, value);
        }
        let request = request.body(Full::new(body)).map_err(|e| failed(&e))?;
        let exchange = async {
            let response = sender.send_request(request).await.map_err(|e| failed(&e))?;
            let status = response.status();
            let retry_after = response.headers().get(header::RETRY_AFTER);
            let retry_after = retry_after.and_then(|v| v.to_str().ok()?.trim().parse().ok());
            let body = Limited::new(response.into_body(), MOST_BYTES)
                .collect()
                .await;
            let text = body
                .map(http_body_util::Collected::to_bytes)
                .unwrap_or_default();
            Ok(Reply {
                status,
                retry_after,
                text: String::from_utf8_lossy(&text).into_owned(),
            })
        };
        let (mut exchange, mut connection) = (pin!(exchange), pin!(connection));
        // The connection lives as long as the exchange, and ends with it when the handler's time is over. A receiver
        // may close it right after its answer, which is complete then: the exchange still has to read it.
        tokio::select! {
            biased;
            reply = &mut exchange => return reply,
            _ = &mut connection => {}
        }
        exchange.await
    }
}

impl fmt::Display for Address {
    /// The host only: a path may hold a secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.host, self.port)
    }
}

/// The certificates of the system, read once.
fn client_config() -> Result<Arc<rustls::ClientConfig>, String> {
    static CONFIG: OnceLock<Result<Arc<rustls::ClientConfig>, String>> = OnceLock::new();
    let config = CONFIG.get_or_init(|| {
        let mut roots = rustls::RootCertStore::empty();
        let found = rustls_native_certs::load_native_certs();
        roots.add_parsable_certificates(found.certs);
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = rustls::ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|e| e.to_string())?
            .with_root_certificates(roots)
            .with_no_client_auth();
        Ok(Arc::new(config))
    });
    config.clone()
}

/// Whether an address is one of the public internet: not this machine, not a private network, not the metadata
/// service of a cloud.
fn is_public(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => is_public_v4(ip),
        IpAddr::V6(ip) => is_public_v6(ip),
    }
}

fn is_public_v4(ip: Ipv4Addr) -> bool {
    let [a, b, c, _] = ip.octets();
    let reserved = a == 0
        || a >= 224
        || (a == 100 && (64..128).contains(&b))
        || (a == 192 && b == 0 && c == 0)
        || (a == 198 && (b == 18 || b == 19));
    !(reserved
        || ip.is_private()
        || ip.is_loopback()
        || ip.is_link_local()
        || ip.is_documentation()
        || ip.is_broadcast())
}

fn is_public_v6(ip: Ipv6Addr) -> bool {
    let s = ip.segments();
    if let Some(inside) = ip.to_ipv4_mapped() {
        return is_public_v4(inside);
    }
    // Addresses that carry an IPv4 address: NAT64 and 6to4.
    let inside = |high: u16, low: u16| {
        let ([a, b], [c, d]) = (high.to_be_bytes(), low.to_be_bytes());
        is_public_v4(Ipv4Addr::new(a, b, c, d))
    };
    if s[0] == 0x64 && s[1] == 0xff9b {
        return inside(s[6], s[7]);
    }
    if s[0] == 0x2002 {
        return inside(s[1], s[2]);
    }
    let global = (s[0] & 0xe000) == 0x2000;
    let documentation = s[0] == 0x2001 && s[1] == 0xdb8;
    global && !documentation
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_public_addresses_are_reached() {
        for bad in [
            "127.0.0.1",
            "10.1.2.3",
            "172.16.0.1",
            "192.168.1.1",
            "169.254.169.254",
            "0.0.0.0",
            "100.64.0.1",
            "224.0.0.1",
            "255.255.255.255",
            "::1",
            "::",
            "fe80::1",
            "fc00::1",
            "::ffff:10.0.0.1",
            "64:ff9b::a9fe:a9fe",
            "2002:7f00:1::",
            "fd00:ec2::254",
        ] {
            assert!(!is_public(bad.parse().unwrap()), "{bad}");
            let url = match bad.contains(':') {
                true => format!("https://[{bad}]/hook"),
                false => format!("https://{bad}/hook"),
            };
            assert!(Address::parse(&url, false).is_err(), "{url}");
            assert!(Address::parse(&url, true).is_ok(), "{url}");
        }
        for good in ["1.1.1.1", "93.184.216.34", "2606:4700:4700::1111"] {
            assert!(is_public(good.parse().unwrap()), "{good}");
        }
    }

    #[test]
    fn other_schemes_and_credentials_are_refused() {
        for bad in [
            "http://example.com/",
            "ftp://example.com/",
            "https://me:pw@example.com/",
            "file:///etc/passwd",
            "example.com",
            "",
        ] {
            assert!(Address::parse(bad, false).is_err(), "{bad}");
        }
        assert!(Address::parse("http://localhost:8080/hook", true).is_ok());
    }
}
