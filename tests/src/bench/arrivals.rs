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
pub(crate) struct ArrivalSpan {
    pub(crate) first: Duration,
    pub(crate) last: Duration,
}

impl<K> Arrivals<K>
where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + 'static,
{
    /// Returns when the initial list is complete. The first call of `wait_for_all` starts the watch request.
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

    /// Waits until `check` accepts `count` objects. For any other object, `check` returns the missing part.
    pub(crate) async fn wait_for_all(
        &mut self,
        count: u32,
        clock: Instant,
        deadline: Duration,
        check: impl Fn(&K) -> Result<(), String>,
    ) -> Result<ArrivalSpan> {
        let mut first = None;
        let mut arrived = BTreeSet::new();
        let mut missing = BTreeMap::new();
        let waiting = async {
            while let Some(event) = self.events.next().await {
                // After an error, the watcher starts a new watch.
                let Ok(Event::Apply(object) | Event::InitApply(object)) = event else {
                    continue;
                };
                let name = object.name_any();
                match check(&object) {
                    Ok(()) => {
                        missing.remove(&name);
                        arrived.insert(name);
                        first.get_or_insert_with(|| clock.elapsed());
                    }
                    Err(reason) => drop(missing.insert(name, reason)),
                }
                if arrived.len() >= count as usize {
                    return Ok(clock.elapsed());
                }
            }
            bail!("the watch ended")
        };
        let Ok(last) = tokio::time::timeout(deadline, waiting).await else {
            let examples: Vec<_> = missing
                .iter()
                .take(5)
                .map(|(name, reason)| format!("{name}: {reason}"))
                .collect();
            bail!(
                "only {} of {count} {} were ready after {deadline:?}; missing: {}",
                arrived.len(),
                K::plural(&()),
                examples.join("; ")
            );
        };
        let last = last?;
        Ok(ArrivalSpan {
            first: first.unwrap_or(last),
            last,
        })
    }
}
