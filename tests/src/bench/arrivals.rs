//! Measures with a watch when each of many objects reached its desired state.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Debug,
    time::{Duration, Instant},
};

use anyhow::{Result, bail};
use futures::{StreamExt, stream::BoxStream};
use kube::{
    Api, Resource, ResourceExt,
    runtime::{
        WatchStreamExt,
        watcher::{self, Event, watcher},
    },
};
use serde::de::DeserializeOwned;

/// A watch that is established before the benchmark creates its first object.
pub(crate) struct Arrivals<K> {
    events: BoxStream<'static, watcher::Result<Event<K>>>,
}

/// First and last arrival, measured from the start of the clock.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Span {
    pub(crate) first: Duration,
    pub(crate) last: Duration,
}

impl<K> Arrivals<K>
where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + 'static,
{
    /// Returns when the initial list is complete. The first call of `all` starts the watch request.
    pub(crate) async fn watch(api: Api<K>) -> Result<Self> {
        let mut events = watcher(api, watcher::Config::default())
            .default_backoff()
            .boxed();
        while let Some(event) = events.next().await {
            if matches!(event?, Event::InitDone) {
                return Ok(Self { events });
            }
        }
        bail!("the watch ended")
    }

    /// Waits until `wanted` accepts `count` objects. For any other object, `wanted` returns the missing part.
    pub(crate) async fn all(
        &mut self,
        count: u32,
        clock: Instant,
        deadline: Duration,
        wanted: impl Fn(&K) -> Result<(), String>,
    ) -> Result<Span> {
        let mut first = None;
        let mut there = BTreeSet::new();
        let mut lacking = BTreeMap::new();
        let arriving = async {
            while let Some(event) = self.events.next().await {
                // After an error, the watcher starts a new watch.
                let Ok(Event::Apply(object) | Event::InitApply(object)) = event else {
                    continue;
                };
                let name = object.name_any();
                match wanted(&object) {
                    Ok(()) => {
                        lacking.remove(&name);
                        there.insert(name);
                        first.get_or_insert_with(|| clock.elapsed());
                    }
                    Err(lack) => drop(lacking.insert(name, lack)),
                }
                if there.len() >= count as usize {
                    return Ok(clock.elapsed());
                }
            }
            bail!("the watch ended")
        };
        let Ok(last) = tokio::time::timeout(deadline, arriving).await else {
            let some: Vec<_> = lacking
                .iter()
                .take(5)
                .map(|(name, lack)| format!("{name}: {lack}"))
                .collect();
            bail!(
                "only {} of {count} {} were ready after {deadline:?}; missing: {}",
                there.len(),
                K::plural(&()),
                some.join("; ")
            );
        };
        let last = last?;
        Ok(Span {
            first: first.unwrap_or(last),
            last,
        })
    }
}
