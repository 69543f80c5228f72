//! Sends requests to URLs that users chose: for consumers, alerts and job ends. The host name is resolved once, and the
//! connection uses the addresses that were checked. Only `https` and public addresses are allowed, unless the options
//! say otherwise. Redirects are not followed. Time and size of the response are limited.

mod public;

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::pin::pin;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use everbus::{Code, Error, Result};
use http_body_util::{BodyExt as _, Collected, Full, Limited};
use hyper::body::Bytes;
use hyper::client::conn::http1;
use hyper::header::{HOST, HeaderValue, RETRY_AFTER, USER_AGENT};
use hyper::{Request, StatusCode, Uri};
use hyper_util::rt::TokioIo;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use serde::Serialize;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use public::is_public;

/// A response body with more bytes is dropped.
const MOST_BYTES: usize = 64 * 1024;
/// The time limit for the connection, and again for the TLS handshake.
const CONNECT: Duration = Duration::from_secs(10);

/// Which URLs a webhook may have, and how long a request may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct WebhookOptions {
    /// Whether plain `http` is allowed.
    pub allow_http: bool,
    /// Whether addresses of private networks, of this machine and of link-local services are allowed. On cloud machines
    /// a link-local service hands out credentials.
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

/// Sends requests to one URL. The URL may contain a secret, so only its host and port are ever shown.
#[derive(Clone)]
pub struct WebhookClient {
    uri: Uri,
    host: String,
    port: u16,
    tls: bool,
    options: WebhookOptions,
}

/// The response of a receiver.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Reply {
    /// The status.
    pub status: StatusCode,
    /// How long to wait before the next request, from the header `Retry-After`.
    pub retry_after: Option<Duration>,
    /// The body; empty if it is longer than 64 KiB or cannot be read.
    pub text: String,
}

impl fmt::Debug for WebhookClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WebhookClient")
            .field("host", &self.host)
            .finish_non_exhaustive()
    }
}

impl fmt::Display for WebhookClient {
    /// Host and port.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.host, self.port)
    }
}

impl WebhookClient {
    /// A client for a URL. The URL is checked as far as possible without a request.
    pub fn new(url: &str, options: WebhookOptions) -> Result<Self> {
        // Errors do not contain the URL: the path of a webhook is often a secret.
        let refused = |why: &str| Error::new(Code::InvalidUrl, format!("the webhook {why}"));
        let uri: Uri = url.parse().map_err(|_| refused("is not a URL"))?;
        let tls = match uri.scheme_str() {
            Some("https") => true,
            Some("http") if options.allow_http => false,
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
        let port = authority.port_u16().unwrap_or(if tls { 443 } else { 80 });
        // An IP address needs no name resolution, so it is checked here.
        if let Ok(address) = host.parse::<IpAddr>()
            && !options.allow_private
            && !is_public(address)
        {
            let why = format!("leads to {address}, which is not a public address");
            return Err(
                refused(&why).hint("allow private addresses for it if this is what you want")
            );
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

    /// Posts a value as JSON. Fails if the status is not 2xx.
    pub async fn post<T: Serialize + ?Sized>(&self, value: &T) -> Result<()> {
        let body = serde_json::to_vec(value).map_err(|error| {
            Error::new(Code::InvalidPayloadError, "the value is no JSON").caused_by(error)
        })?;
        let headers = [("content-type", "application/json".to_owned())];
        match self.send(&headers, body.into()).await?.status {
            status if status.is_success() => Ok(()),
            // A redirect could lead to an address that was not checked.
            status if status.is_redirection() => Err(self.failed(format_args!(
                "answered {status}, and redirects are not followed"
            ))),
            status => Err(self.failed(format_args!("answered {status}"))),
        }
    }

    /// Posts a body with these headers, and returns the response, whatever its status is. An error shows only the host
    /// and port of the URL.
    pub async fn send(&self, headers: &[(&str, String)], body: Bytes) -> Result<Reply> {
        let limit = self.options.timeout;
        match tokio::time::timeout(limit, self.request(headers, body)).await {
            Ok(sent) => sent,
            Err(_) => Err(self.failed(format_args!("did not answer within {limit:?}"))),
        }
    }

    async fn request(&self, headers: &[(&str, String)], body: Bytes) -> Result<Reply> {
        let stream = tokio::time::timeout(CONNECT, self.connect()).await;
        let stream = stream.map_err(|_| self.failed("has no connection in time"))??;
        if !self.tls {
            return self.exchange(stream, headers, body).await;
        }
        let name = ServerName::try_from(self.host.clone())
            .map_err(|_| self.failed("has a host that no certificate can name"))?;
        let tls = TlsConnector::from(client_config()?).connect(name, stream);
        let stream = tokio::time::timeout(CONNECT, tls).await;
        let stream = stream
            .map_err(|_| self.failed("has no TLS in time"))?
            .map_err(|error| self.failed(error))?;
        self.exchange(stream, headers, body).await
    }

    /// Resolves the name once, and connects to the addresses that were checked: a second resolution could give others.
    async fn connect(&self) -> Result<TcpStream> {
        let found = tokio::net::lookup_host((self.host.as_str(), self.port)).await;
        let found: Vec<SocketAddr> = match found {
            Ok(found) => found.collect(),
            Err(error) => return Err(self.failed(format_args!("cannot be resolved: {error}"))),
        };
        // One private address is enough to refuse: a name with private and public addresses is probably an attack.
        let private = found.iter().find(|address| !is_public(address.ip()));
        if let Some(address) = private
            && !self.options.allow_private
        {
            let ip = address.ip();
            return Err(self.failed(format_args!("leads to {ip}, which is not a public address")));
        }
        let mut last = None;
        for address in found {
            match TcpStream::connect(address).await {
                Ok(stream) => return Ok(stream),
                Err(error) => last = Some(error),
            }
        }
        Err(last.map_or_else(|| self.failed("has no address"), |error| self.failed(error)))
    }

    async fn exchange<S>(&self, stream: S, headers: &[(&str, String)], body: Bytes) -> Result<Reply>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let handshake = http1::handshake(TokioIo::new(stream)).await;
        let (mut sender, connection) = handshake.map_err(|error| self.failed(error))?;
        let path = self.uri.path_and_query().map_or("/", |path| path.as_str());
        let host = self.uri.authority().map_or("", |host| host.as_str());
        let mut request = Request::post(path).header(HOST, host).header(
            USER_AGENT,
            HeaderValue::from_static(concat!("everbus/", env!("CARGO_PKG_VERSION"))),
        );
        for (name, value) in headers {
            request = request.header(*name, value);
        }
        let request = request.body(Full::new(body));
        let request = request.map_err(|error| self.failed(error))?;
        let exchange = async {
            let response = sender.send_request(request).await;
            let response = response.map_err(|error| self.failed(error))?;
            let status = response.status();
            let retry_after = response.headers().get(RETRY_AFTER);
            let retry_after = retry_after.and_then(|value| pause(value.to_str().ok()?));
            let body = Limited::new(response.into_body(), MOST_BYTES);
            let text = body.collect().await.map(Collected::to_bytes);
            Ok(Reply {
                status,
                retry_after,
                text: String::from_utf8_lossy(&text.unwrap_or_default()).into_owned(),
            })
        };
        let (mut exchange, mut connection) = (pin!(exchange), pin!(connection));
        // The connection must be polled while the exchange runs. A receiver may close the connection right after its
        // response: then the exchange reads the rest of the response alone.
        tokio::select! {
            biased;
            reply = &mut exchange => return reply,
            _ = &mut connection => {}
        }
        exchange.await
    }

    fn failed(&self, why: impl fmt::Display) -> Error {
        Error::new(Code::Busy, format!("the webhook at {self}: {why}"))
    }
}

/// Parses a `Retry-After`: seconds, or a date. A past date gives zero.
fn pause(text: &str) -> Option<Duration> {
    let text = text.trim();
    if let Ok(seconds) = text.parse() {
        return Some(Duration::from_secs(seconds));
    }
    let date = jiff::fmt::rfc2822::DateTimeParser::new().parse_timestamp(text);
    let date = u64::try_from(date.ok()?.as_second()).ok()?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).ok()?;
    Some(Duration::from_secs(date).saturating_sub(now))
}

/// The TLS settings, with the root certificates of the system. They are read once.
fn client_config() -> Result<Arc<ClientConfig>> {
    static CONFIG: OnceLock<Result<Arc<ClientConfig>, String>> = OnceLock::new();
    let config = CONFIG.get_or_init(|| {
        let mut roots = rustls::RootCertStore::empty();
        let found = rustls_native_certs::load_native_certs();
        roots.add_parsable_certificates(found.certs);
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| error.to_string())?
            .with_root_certificates(roots)
            .with_no_client_auth();
        Ok(Arc::new(config))
    });
    config
        .clone()
        .map_err(|error| Error::new(Code::Internal, format!("TLS cannot be set up: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_checked_and_never_shown() {
        let options = WebhookOptions::default();
        for (url, why) in [
            ("http://example.com/secret", "http"),
            ("ftp://example.com/secret", "https"),
            ("file:///etc/secret", "not a URL"),
            ("https://user:secret@example.com/", "user name"),
            ("https://127.0.0.1/secret", "not a public address"),
            ("https://[::1]/secret", "not a public address"),
            (
                "https://[64:ff9b::a9fe:a9fe]/secret",
                "not a public address",
            ),
            (
                "https://169.254.169.254/latest/secret",
                "not a public address",
            ),
            ("/secret", "https"),
            ("example.com", "https"),
            ("not a url secret", "not a URL"),
            ("", "not a URL"),
        ] {
            let error = WebhookClient::new(url, options).unwrap_err();
            assert_eq!(error.code(), Code::InvalidUrl, "{url}");
            let error = error.to_string();
            assert!(error.contains(why), "{url}: {error}");
            assert!(!error.contains("secret"), "{error}");
        }
        let client = WebhookClient::new("https://hooks.example.com/secret", options).unwrap();
        assert_eq!(client.host(), "hooks.example.com");
        assert_eq!(client.to_string(), "hooks.example.com:443");
        assert!(!format!("{client:?}").contains("secret"));
        let private = options.allow_http(true).allow_private(true);
        for url in [
            "http://127.0.0.1:8080/",
            "http://localhost:8080/hook",
            "https://10.0.0.1/",
        ] {
            WebhookClient::new(url, private).unwrap();
        }
    }

    #[test]
    fn a_receiver_asks_for_seconds_or_names_a_date() {
        assert_eq!(pause(" 120 "), Some(Duration::from_secs(120)));
        assert_eq!(pause("Sun, 06 Nov 1994 08:49:37 GMT"), Some(Duration::ZERO));
        let hour = jiff::Timestamp::now() + jiff::SignedDuration::from_hours(1);
        let date = jiff::fmt::rfc2822::DateTimePrinter::new()
            .timestamp_to_rfc9110_string(&hour)
            .unwrap();
        let asked = pause(&date).unwrap();
        assert!(asked > Duration::from_secs(3500) && asked <= Duration::from_secs(3600));
        for nonsense in ["", "soon", "-1", "1.5", "Sun, 99 Nov 1994 08:49:37 GMT"] {
            assert_eq!(pause(nonsense), None, "{nonsense}");
        }
    }
}
