//! Sends JSON to a URL outside, carefully: the address is resolved once, checked and then used; redirects are not
//! followed; only `https`, unless allowed.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use everbus::{Code, Error, Result};
use http_body_util::Full;
use hyper::body::Bytes;
use hyper::header::{CONTENT_TYPE, HOST, HeaderValue, USER_AGENT};
use hyper::{Method, Request, StatusCode, Uri};
use hyper_util::rt::TokioIo;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use serde::Serialize;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

/// What a webhook may reach.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct WebhookOptions {
    /// Whether plain `http` is allowed.
    pub allow_http: bool,
    /// Whether addresses of private networks, of this machine and of link-local services are allowed. Cloud machines
    /// have services at such addresses that hand out credentials.
    pub allow_private: bool,
    /// How long a request may take (10 s).
    pub timeout: Duration,
}

impl Default for WebhookOptions {
    fn default() -> Self {
        Self {
            allow_http: false,
            allow_private: false,
            timeout: Duration::from_secs(10),
        }
    }
}

impl WebhookOptions {
    /// Allows plain `http`.
    #[must_use]
    pub fn allow_http(mut self, allow: bool) -> Self {
        self.allow_http = allow;
        self
    }

    /// Allows addresses of private networks and of this machine.
    #[must_use]
    pub fn allow_private(mut self, allow: bool) -> Self {
        self.allow_private = allow;
        self
    }

    /// Sets how long a request may take.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }
}

/// Posts JSON to one URL. The URL may carry a secret: it is never shown, only its host is.
#[derive(Clone)]
pub struct WebhookClient {
    uri: Uri,
    host: String,
    port: u16,
    tls: Option<TlsConnector>,
    options: WebhookOptions,
}

impl fmt::Debug for WebhookClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WebhookClient")
            .field("host", &self.host)
            .finish_non_exhaustive()
    }
}

impl WebhookClient {
    /// A client for a URL, which is checked as far as possible without a request.
    pub fn new(url: &str, options: WebhookOptions) -> Result<Self> {
        // The URL is not repeated in errors: the path of a webhook is its password.
        let refused = |why: &str| Error::new(Code::InvalidSetting, format!("the webhook {why}"));
        let uri: Uri = url.parse().map_err(|_| refused("is not a URL"))?;
        let tls = match uri.scheme_str() {
            Some("https") => Some(connector()?),
            Some("http") if options.allow_http => None,
            Some("http") => {
                return Err(refused("has http").hint("use https, or allow http for it"));
            }
            _ => return Err(refused("has no scheme https")),
        };
        let authority = uri.authority().ok_or_else(|| refused("has no host"))?;
        if authority.as_str().contains('@') {
            return Err(refused("has a user name").hint("put the secret into the path"));
        }
        let host = authority.host().trim_matches(['[', ']']).to_owned();
        let port = authority
            .port_u16()
            .unwrap_or(if tls.is_some() { 443 } else { 80 });
        // An address needs no resolving: it is checked at once.
        if let Ok(address) = host.parse::<IpAddr>() {
            check(address, options)?;
        }
        Ok(Self {
            uri,
            host,
            port,
            tls,
            options,
        })
    }

    /// The host, for logs.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// Posts a value as JSON. An error if the answer is not 2xx.
    pub async fn post<T: Serialize + ?Sized>(&self, value: &T) -> Result<()> {
        let body = serde_json::to_vec(value).map_err(|error| {
            Error::new(Code::InvalidPayloadError, "the value is no JSON").caused_by(error)
        })?;
        let limit = self.options.timeout;
        match tokio::time::timeout(limit, self.send(body)).await {
            Ok(sent) => sent,
            Err(_) => Err(self.failed(&format!("did not answer within {limit:?}"))),
        }
    }

    async fn send(&self, body: Vec<u8>) -> Result<()> {
        let stream = self.connect().await?;
        let status = match &self.tls {
            None => self.exchange(TokioIo::new(stream), body).await?,
            Some(tls) => {
                let name = ServerName::try_from(self.host.clone())
                    .map_err(|_| self.failed("has a host that no certificate can name"))?;
                let stream = tls.connect(name, stream).await;
                let stream = stream.map_err(|error| self.failed(&error.to_string()))?;
                self.exchange(TokioIo::new(stream), body).await?
            }
        };
        match status {
            status if status.is_success() => Ok(()),
            // A redirect would lead to an address that was not checked.
            status if status.is_redirection() => Err(self.failed(&format!(
                "answered {status}, and redirects are not followed"
            ))),
            status => Err(self.failed(&format!("answered {status}"))),
        }
    }

    /// Resolves the host once, and connects to what was checked.
    async fn connect(&self) -> Result<TcpStream> {
        let found = tokio::net::lookup_host((self.host.as_str(), self.port)).await;
        let found: Vec<SocketAddr> = match found {
            Ok(found) => found.collect(),
            Err(error) => return Err(self.failed(&format!("cannot be resolved: {error}"))),
        };
        // One bad address is enough to refuse: a name that mixes both is an attempt to slip through.
        for address in &found {
            check(address.ip(), self.options)?;
        }
        let mut last = None;
        for address in found {
            match TcpStream::connect(address).await {
                Ok(stream) => return Ok(stream),
                Err(error) => last = Some(error),
            }
        }
        let why = last.map_or_else(|| "has no address".to_owned(), |error| error.to_string());
        Err(self.failed(&why))
    }

    async fn exchange<S>(&self, io: S, body: Vec<u8>) -> Result<StatusCode>
    where
        S: hyper::rt::Read + hyper::rt::Write + Unpin + Send + 'static,
    {
        let failed = |error: &dyn fmt::Display| self.failed(&error.to_string());
        let (mut sender, connection) = hyper::client::conn::http1::handshake(io)
            .await
            .map_err(|error| failed(&error))?;
        let path = self.uri.path_and_query().map_or("/", |path| path.as_str());
        let authority = self
            .uri
            .authority()
            .map_or("", |authority| authority.as_str());
        let request = Request::builder()
            .method(Method::POST)
            .uri(path)
            .header(HOST, authority)
            .header(CONTENT_TYPE, HeaderValue::from_static("application/json"))
            .header(USER_AGENT, HeaderValue::from_static("everbus"))
            .body(Full::new(Bytes::from(body)))
            .map_err(|error| failed(&error))?;
        let mut connection = std::pin::pin!(connection);
        let mut response = std::pin::pin!(sender.send_request(request));
        // The body of the answer is not read: dropping the connection ends it.
        loop {
            tokio::select! {
                response = &mut response => {
                    return response.map(|response| response.status()).map_err(|error| failed(&error));
                }
                ended = &mut connection => ended.map_err(|error| failed(&error))?,
            }
        }
    }

    fn failed(&self, why: &str) -> Error {
        Error::new(Code::Busy, format!("the webhook at {} {why}", self.host))
    }
}

fn connector() -> Result<TlsConnector> {
    let mut roots = rustls::RootCertStore::empty();
    let found = rustls_native_certs::load_native_certs();
    roots.add_parsable_certificates(found.certs);
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config =
        ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let config = config
        .map_err(|error| Error::new(Code::Internal, "TLS cannot be set up").caused_by(error))?;
    let config = config.with_root_certificates(roots).with_no_client_auth();
    Ok(TlsConnector::from(Arc::new(config)))
}

/// Refuses an address that only this machine or its network should reach.
fn check(address: IpAddr, options: WebhookOptions) -> Result<()> {
    if options.allow_private || is_public(address) {
        return Ok(());
    }
    let what = format!("the webhook leads to {address}, which is not a public address");
    Err(Error::new(Code::InvalidSetting, what)
        .hint("allow private addresses for it if this is what you want"))
}

/// Whether an address is one of the public internet.
pub(crate) fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => is_public_v4(address),
        IpAddr::V6(address) => is_public_v6(address),
    }
}

fn is_public_v4(address: Ipv4Addr) -> bool {
    let [a, b, c, _] = address.octets();
    let reserved = address.is_private()
        || address.is_loopback()
        || address.is_link_local()
        || address.is_multicast()
        || address.is_broadcast()
        || address.is_documentation()
        || address.is_unspecified();
    let others = a == 0
        || a >= 240
        // Networks of providers, protocols, 6to4 relays and benchmarks.
        || (a == 100 && (64..128).contains(&b))
        || (a == 192 && b == 0 && c == 0)
        || (a == 192 && b == 88 && c == 99)
        || (a == 198 && (b == 18 || b == 19));
    !reserved && !others
}

fn is_public_v6(address: Ipv6Addr) -> bool {
    // Forms that carry an address of version 4: mapped, compatible, translated, 6to4.
    let segments = address.segments();
    let inner = |high: u16, low: u16| {
        let [a, b] = high.to_be_bytes();
        let [c, d] = low.to_be_bytes();
        Ipv4Addr::new(a, b, c, d)
    };
    if let Some(mapped) = address.to_ipv4_mapped() {
        return is_public_v4(mapped);
    }
    if segments[..6] == [0x64, 0xff9b, 0, 0, 0, 0] {
        return is_public_v4(inner(segments[6], segments[7]));
    }
    if segments[0] == 0x2002 {
        return is_public_v4(inner(segments[1], segments[2]));
    }
    // 2000::/3 is what has been given out; documentation and Teredo are inside it.
    let given_out = segments[0] & 0xe000 == 0x2000;
    let documentation = segments[0] == 0x2001 && segments[1] == 0xdb8 || segments[0] == 0x3fff;
    let teredo = segments[0] == 0x2001 && segments[1] == 0;
    given_out && !documentation && !teredo
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_public_addresses_are_public() {
        for address in [
            "127.0.0.1",
            "10.1.2.3",
            "172.16.0.1",
            "192.168.1.1",
            "169.254.169.254",
            "100.64.0.1",
            "100.127.255.255",
            "0.0.0.0",
            "0.1.2.3",
            "224.0.0.1",
            "255.255.255.255",
            "192.0.0.192",
            "198.18.0.1",
            "240.0.0.1",
            "::1",
            "::",
            "::ffff:127.0.0.1",
            "::ffff:169.254.169.254",
            "::127.0.0.1",
            "64:ff9b::a9fe:a9fe",
            "2002:7f00:1::",
            "fe80::1",
            "fc00::1",
            "fd00:ec2::254",
            "ff02::1",
            "2001:db8::1",
            "2001::1",
        ] {
            assert!(!is_public(address.parse().unwrap()), "{address}");
        }
        for address in [
            "1.1.1.1",
            "8.8.8.8",
            "100.63.0.1",
            "100.128.0.1",
            "172.32.0.1",
            "2606:4700::1111",
            "::ffff:8.8.8.8",
            "64:ff9b::808:808",
        ] {
            assert!(is_public(address.parse().unwrap()), "{address}");
        }
    }

    #[test]
    fn urls_are_checked_and_never_shown() {
        let options = WebhookOptions::default();
        for (url, why) in [
            ("http://example.com/secret", "http"),
            ("ftp://example.com/secret", "https"),
            ("https://user:secret@example.com/", "user name"),
            ("https://127.0.0.1/secret", "not a public address"),
            ("https://[::1]/secret", "not a public address"),
            (
                "https://169.254.169.254/latest/secret",
                "not a public address",
            ),
            ("/secret", "https"),
            ("not a url secret", "not a URL"),
        ] {
            let error = WebhookClient::new(url, options).unwrap_err().to_string();
            assert!(error.contains(why), "{url}: {error}");
            assert!(!error.contains("secret"), "{error}");
        }
        let client = WebhookClient::new("https://hooks.example.com/secret", options).unwrap();
        assert_eq!(client.host(), "hooks.example.com");
        assert!(!format!("{client:?}").contains("secret"));
        let private = options.allow_http(true).allow_private(true);
        WebhookClient::new("http://127.0.0.1:8080/", private).unwrap();
    }
}
