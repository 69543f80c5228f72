//! Webhooks: each event is posted as a CloudEvent, signed according to the Standard Webhooks specification.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use data_encoding::BASE64;
use everbus::dialects;
use everbus::{Bus, Code, Dialect, Error, HandlerError, HandlerResult, Message, Result};
use everbus_jobs::webhook::{Reply, WebhookClient, WebhookOptions};
use http::StatusCode;
use ring::hmac;

/// The prefix of a secret in base64.
const PREFIX: &str = "whsec_";
/// How many characters of a response are in an error, at most.
const SHOWN: usize = 500;
/// The longest pause that a receiver can ask for with `Retry-After`.
const LONGEST_PAUSE: Duration = Duration::from_secs(24 * 3600);
/// The timeout of the client. It only has to be longer than the timeout of the handler, which limits a delivery.
const LONGEST: Duration = Duration::from_secs(24 * 3600);

/// A webhook that is ready to deliver.
pub(crate) struct Hook {
    client: WebhookClient,
    keys: Vec<hmac::Key>,
}

impl Hook {
    /// Checks the address and the secrets.
    pub(crate) fn new(url: &str, secrets: &[String], private: bool) -> Result<Self> {
        let keys = secrets.iter().map(|secret| key(secret));
        let options = WebhookOptions::default()
            .allow_http(private)
            .allow_private(private)
            .timeout(LONGEST);
        let client = WebhookClient::new(url, options).map_err(|error| {
            error
                .hint("http:// and private addresses need allow_private or server.private_webhooks")
        })?;
        Ok(Self {
            client,
            keys: keys.collect::<Result<_>>()?,
        })
    }

    /// Delivers an event. The timeout of the handler limits it.
    pub(crate) async fn deliver(&self, bus: &Bus, message: &Message) -> HandlerResult {
        let event = message.event();
        let body =
            dialects::encode(event, Dialect::CloudEvents).map_err(HandlerError::permanent)?;
        let body = Bytes::from(body);
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let timestamp = now.map_or(0, |now| now.as_secs());
        // The id is the same in every attempt, so that the receiver recognises a duplicate.
        let id = event.id().to_string();
        let mut headers = vec![
            ("content-type", "application/cloudevents+json".to_owned()),
            ("webhook-id", id.clone()),
            ("webhook-timestamp", timestamp.to_string()),
            ("x-request-id", event.correlation_id().into_owned()),
        ];
        if !self.keys.is_empty() {
            headers.push((
                "webhook-signature",
                signature(&self.keys, &id, timestamp, &body),
            ));
        }
        if let Some(trace) = event.attributes().and_then(|a| a.trace.as_ref()) {
            headers.push(("traceparent", trace.traceparent.clone()));
        }
        let reply = self.client.send(&headers, body).await;
        let reply = reply.map_err(|error| HandlerError::new(error.message().to_owned()))?;
        self.judge(bus, message, &reply).await
    }

    async fn judge(&self, bus: &Bus, message: &Message, reply: &Reply) -> HandlerResult {
        let status = reply.status;
        if status.is_success() {
            return Ok(());
        }
        let text: String = reply.text.chars().take(SHOWN).collect();
        let what = format!("{} answered {status}: {text}", self.client);
        match status {
            StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => {
                match reply.retry_after {
                    Some(after) => Err(HandlerError::retry_after(what, after.min(LONGEST_PAUSE))),
                    None => Err(HandlerError::new(what)),
                }
            }
            StatusCode::GONE => {
                // The receiver wants no more events: the group is paused, and keeps the events until an operator
                // decides.
                let reason = format!("{} answered 410 Gone", self.client);
                bus.pause_group(message.group().clone(), Some(reason))
                    .await?;
                Err(HandlerError::retry_after(what, Duration::from_secs(1)))
            }
            _ => Err(HandlerError::new(what)),
        }
    }
}

/// `v1,SIGNATURE` for each secret. With two secrets, receivers can change from the old to the new one.
fn signature(keys: &[hmac::Key], id: &str, timestamp: u64, body: &[u8]) -> String {
    let signed = keys.iter().map(|key| {
        let mut context = hmac::Context::with_key(key);
        context.update(format!("{id}.{timestamp}.").as_bytes());
        context.update(body);
        format!("v1,{}", BASE64.encode(context.sign().as_ref()))
    });
    signed.collect::<Vec<_>>().join(" ")
}

/// Parses a secret: `whsec_` and base64, or any other text. It must have at least 24 bytes.
fn key(secret: &str) -> Result<hmac::Key> {
    let bytes = match secret.strip_prefix(PREFIX) {
        Some(encoded) => BASE64.decode(encoded.as_bytes()).ok(),
        None => Some(secret.as_bytes().to_vec()),
    };
    match bytes {
        Some(bytes) if bytes.len() >= 24 => Ok(hmac::Key::new(hmac::HMAC_SHA256, &bytes)),
        _ => Err(Error::new(
            Code::InvalidSetting,
            "the secret of a webhook is too short or not base64",
        )
        .hint("whsec_ followed by base64 of 24 to 64 random bytes")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_signed_as_standard_webhooks_says() {
        // The example in the specification.
        let key = key("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw").unwrap();
        let body = br#"{"test": 2432232314}"#;
        let signed = signature(&[key], "msg_p5jXN8AQM9LWM0D4loKWxJek", 1_614_265_330, body);
        assert_eq!(signed, "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=");
    }

    #[test]
    fn short_and_broken_secrets_are_refused() {
        for bad in ["", "whsec_", "whsec_!!", "short", "whsec_c2hvcnQ="] {
            assert_eq!(key(bad).unwrap_err().code(), Code::InvalidSetting, "{bad}");
        }
    }
}
