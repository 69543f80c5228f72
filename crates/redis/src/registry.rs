//! The registry of streams: the known streams, and the dialect of each. Groups with wildcards find streams in it.

use std::collections::BTreeMap;
use std::sync::Arc;

use everbus_core::{Pattern, Result, Stream, Streams};
use everbus_dialects::Dialect;

use crate::broker::Shared;
use crate::client::{Arguments, Read as _};
use crate::scripts::REGISTER;

/// The streams as the server knew them.
#[derive(Debug, Default)]
pub(crate) struct Registry {
    /// A text that is different after every change.
    pub(crate) version: String,
    pub(crate) streams: BTreeMap<String, Dialect>,
}

impl Registry {
    pub(crate) fn dialect(&self, key: &str) -> Dialect {
        self.streams.get(key).copied().unwrap_or(Dialect::Native)
    }
}

impl Shared {
    /// The registry as this process read it last.
    pub(crate) fn registry(&self) -> Arc<Registry> {
        self.registry.read().clone()
    }

    /// Reads the registry.
    pub(crate) async fn load_registry(&self) -> Result<Arc<Registry>> {
        // Reads the version first: the streams that are read after it are at least as new.
        let mut get = redis::cmd("GET");
        get.arg(self.space.own("registry"));
        let version = self.link.ask(&get).await?.text()?;
        let version = match version.is_empty() {
            true => "0".to_owned(),
            false => version,
        };
        let mut all = redis::cmd("HGETALL");
        all.arg(self.space.own("streams"));
        let mut flat = self.link.ask(&all).await?.list()?.into_iter();
        let mut streams = BTreeMap::new();
        while let (Some(key), Some(dialect)) = (flat.next(), flat.next()) {
            let dialect = dialect.text()?.parse().unwrap_or(Dialect::Native);
            streams.insert(key.text()?, dialect);
        }
        let registry = Arc::new(Registry { version, streams });
        *self.registry.write() = registry.clone();
        Ok(registry)
    }

    /// Declares the streams of a table. A declaration applies to the streams on the server that its patterns cover.
    ///
    /// A bus that declares no streams changes nothing: the streams of others keep their dialects.
    pub(crate) async fn declare_table(&self, table: Streams) -> Result<()> {
        *self.type_limits.write() = table.type_limits().cloned().map(Arc::new);
        if !table.is_declared() {
            *self.table.write() = None;
            return self.load_registry().await.map(drop);
        }
        let dialects: Vec<(Pattern, Dialect)> = table
            .iter()
            .map(|stream| {
                let dialect = match &stream.dialect {
                    Some(name) => name.parse()?,
                    None => Dialect::Native,
                };
                Ok((stream.types().clone(), dialect))
            })
            .collect::<Result<_>>()?;
        let registry = self.load_registry().await?;
        let mut wanted: BTreeMap<String, Dialect> = BTreeMap::new();
        let named = table.iter().flat_map(Stream::patterns);
        let named = named.filter_map(|pattern| pattern.exact());
        let named = named.map(|event_type| self.space.stream(event_type));
        for key in registry.streams.keys().cloned().chain(named) {
            let dotted = &self.space.types(&key)[0];
            let of = dialects.iter().find(|(types, _)| types.matches(dotted));
            if let Some((_, dialect)) = of
                && registry.streams.get(&key) != Some(dialect)
            {
                wanted.insert(key, *dialect);
            }
        }
        self.register(&wanted).await?;
        *self.table.write() = Some(Arc::new(table));
        Ok(())
    }

    /// Sets the dialects of streams.
    pub(crate) async fn register(&self, streams: &BTreeMap<String, Dialect>) -> Result<()> {
        if streams.is_empty() {
            return Ok(());
        }
        let mut arguments = Arguments::default();
        arguments.number(streams.len());
        for (key, dialect) in streams {
            arguments.text(key).text(dialect.as_str());
        }
        self.link.run(&REGISTER, &arguments).await?;
        self.load_registry().await.map(drop)
    }

    /// The dialect of a stream: the declared one if this process declares the stream, else that of the registry.
    pub(crate) fn dialect(&self, key: &str, registry: &Registry) -> Dialect {
        let table = self.table.read().clone();
        let dotted = self.space.types(key).swap_remove(0);
        let declared = table.as_ref().and_then(|table| table.of(&dotted));
        match declared.map(|stream| &stream.dialect) {
            Some(Some(name)) => name.parse().unwrap_or(Dialect::Native),
            Some(None) => Dialect::Native,
            None => registry.dialect(key),
        }
    }

    /// The stream of an event type, and its dialect.
    pub(crate) fn route(&self, event_type: &str) -> Result<(String, Dialect)> {
        let table = self.table.read().clone();
        let key = self.space.stream(event_type);
        let dialect = match table {
            Some(table) => match &table.route(event_type)?.dialect {
                Some(name) => name.parse()?,
                None => Dialect::Native,
            },
            None => self.registry().dialect(&key),
        };
        Ok((key, dialect))
    }
}
