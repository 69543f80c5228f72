//! Applies a configuration file to the settings of a bus.

use everbus_core::{Code, Error, Result};

use crate::config::{Breaker, Config, Consumer};
use crate::open::builder::BusBuilder;
use crate::runtime::bus::Bus;
use crate::runtime::options::ConsumerOverride;
use crate::runtime::subscription::settings::Settings;

impl BusBuilder {
    /// Applies a configuration file: the streams and their limits, staleness, the publish rate, the
    /// overflow, the retention, and the settings of its consumers. The settings of a consumer apply to the
    /// handlers that this program subscribes in its group to its stream, and override those of the program:
    /// a deployment is tuned in the file.
    ///
    /// ```
    /// use everbus::{Bus, Config};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> everbus::Result<()> {
    /// let config = Config::parse(
    ///     "broker: {type: memory}\nconsumers: {mail: {stream: 'orders:order-placed', processing_timeout: 5}}",
    ///     "everbus.yaml",
    /// )?;
    /// let bus = Bus::builder().config(&config).open_configured().await?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn config(mut self, config: &Config) -> Self {
        let options = &mut self.options;
        options.streams = config.streams.clone();
        options.limits = config.limits.clone();
        options.publish_rate = config.backpressure.publish_rate;
        options.max_staleness = config.backpressure.max_staleness.clone();
        if let Some(overflow) = &config.overflow {
            options.overflow = overflow.clone();
        }
        if let Some(retention) = &config.retention {
            options.retention = Some(retention.clone());
        }
        let consumers = config.consumers.iter();
        let consumers = consumers.map(|c| ConsumerOverride {
            whole_stream: config.streams.is_declared() && config.streams.named(&c.stream).is_some(),
            ..consumer(c)
        });
        options.consumers = consumers.collect();
        if let Some(broker) = &config.broker {
            self = self.access(broker.access.clone());
        }
        self.url = config.broker_url();
        self.config = Some(Box::new(config.clone()));
        self
    }

    /// Opens the bus on the engine of the configuration file, with its store beside it.
    pub async fn open_configured(mut self) -> Result<Bus> {
        let Some(url) = self.url.take() else {
            return Err(Error::new(
                Code::InvalidConfig,
                "no configuration that names an engine was given",
            )
            .hint("add broker: with type and url to the file, or open the bus with a URL"));
        };
        let store = self.config.as_ref().and_then(|config| config.store_url());
        self.store = self.store.take().or(store);
        self.open(url).await
    }
}

impl Bus {
    /// Opens a bus from a configuration file; see [`BusBuilder::config`].
    pub async fn open_file(path: impl AsRef<std::path::Path>) -> Result<Bus> {
        let config = Config::load(path)?;
        Self::builder().config(&config).open_configured().await
    }
}

fn consumer(consumer: &Consumer) -> ConsumerOverride {
    let retry = consumer.retry;
    let mut settings = Settings {
        timeout: consumer.processing_timeout,
        concurrency: consumer.concurrency,
        ordered: consumer.ordered,
        idempotent: consumer.idempotent,
        start_from: consumer.start_from,
        criticality: consumer.criticality,
        decode: consumer.decode,
        dependency: consumer.dependency.clone(),
        breaker: match consumer.circuit_breaker {
            Breaker::Unsaid => None,
            said => Some(said.policy()),
        },
        ..Settings::default()
    };
    if let Some(retry) = retry {
        let change = move |policy| retry.over(policy);
        settings.retry.push(std::sync::Arc::new(change));
    }
    ConsumerOverride {
        name: consumer.name.clone(),
        group: consumer.group.clone(),
        pattern: consumer.pattern.clone(),
        whole_stream: false,
        settings,
    }
}
