//! A watch of home that begins with a list in each tenure: what a standby has seen may be old, where it was
//! cut off from home, or its watch was dead without an end.

use std::fmt;
use std::time::Duration;

use futures::StreamExt as _;
use futures::stream::BoxStream;
use krypton_runtime::clock::BootTime;
use kube::runtime::watcher::{self, Event};
use tokio::time::{Instant, sleep_until};

use super::LeaderTerm;

/// The list of a tenure is asked for again after so long without a word; twice as long each time. Beside the
/// Lease's duration it leaves time for a second one within ten seconds of a takeover.
const SILENCE: Duration = Duration::from_secs(2);
/// After a failure, as the watch pauses by itself for that long at most.
const AFTER_FAILURE: Duration = Duration::from_secs(10);
const LONGEST: Duration = Duration::from_secs(60);

type Events<K> = BoxStream<'static, watcher::Result<Event<K>>>;

pub(crate) struct Watched<K> {
    open: Box<dyn Fn() -> Events<K> + Send>,
    events: Events<K>,
    /// The tenure that it was last opened for, by its beginning.
    of: Option<BootTime>,
    /// A list is waited for: until then for the next word of it, and how long for each.
    awaited: Option<(Instant, Duration)>,
}

impl<K> fmt::Debug for Watched<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watched")
            .field("of", &self.of)
            .finish_non_exhaustive()
    }
}

impl<K> Watched<K> {
    pub(crate) fn new(open: impl Fn() -> Events<K> + Send + 'static) -> Self {
        Self {
            events: open(),
            open: Box::new(open),
            of: None,
            awaited: None,
        }
    }

    /// True when this is another tenure than the last: then it is opened anew, and what was known counts as
    /// not known until the list is whole. In doubt it is the same tenure, and a standby has none.
    pub(crate) fn begins(&mut self, tenure: Option<&LeaderTerm>) -> bool {
        let since = tenure.map(|tenure| tenure.since);
        if since.is_none() || since == self.of {
            return false;
        }
        self.of = since;
        self.anew();
        true
    }

    /// The tenure that it was last opened for, by its beginning.
    pub(crate) fn of(&self) -> Option<BootTime> {
        self.of
    }

    /// Begins with a list again; the former watch is dropped, whatever it waits for.
    pub(crate) fn anew(&mut self) {
        self.open_for(SILENCE);
    }

    fn open_for(&mut self, patience: Duration) {
        self.events = (self.open)();
        self.awaited = Some((Instant::now() + patience, patience));
    }

    /// Can be dropped and called again.
    pub(crate) async fn next(&mut self) -> Option<watcher::Result<Event<K>>> {
        loop {
            let due = self.awaited.map(|(due, _)| due);
            let silent = async {
                match due {
                    Some(due) => sleep_until(due).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                event = self.events.next() => {
                    self.awaited = match (&event, self.awaited) {
                        (Some(Ok(Event::InitDone)), _) | (_, None) => None,
                        (Some(Err(_)), Some((_, patience))) => {
                            Some((Instant::now() + AFTER_FAILURE + patience, patience))
                        }
                        (_, Some((_, patience))) => Some((Instant::now() + patience, patience)),
                    };
                    return event;
                }
                () = silent => {
                    let before = self.awaited.map_or(SILENCE, |(_, patience)| patience);
                    tracing::warn!(silent_s = before.as_secs(), "home does not answer a list at the beginning of a lead; it is asked for again");
                    self.open_for((before * 2).min(LONGEST));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use futures::stream;
    use krypton_runtime::lease::LeaseTerm;

    use super::*;

    fn tenure(since: u64) -> LeaderTerm {
        LeaderTerm {
            epoch: 1,
            term: LeaseTerm::default(),
            since: BootTime(Duration::from_secs(since)),
            won: jiff::Timestamp::UNIX_EPOCH,
            former: None,
        }
    }

    /// The first so many watches say nothing; each later one lists nothing and stays.
    fn watched(hang: usize) -> (Arc<AtomicUsize>, Watched<()>) {
        let opened = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&opened);
        let watched = Watched::new(move || {
            let number = count.fetch_add(1, Ordering::Relaxed);
            let list = [Ok(Event::Init), Ok(Event::InitDone)];
            let said = list.into_iter().take(if number < hang { 1 } else { 2 });
            stream::iter(said).chain(stream::pending()).boxed()
        });
        (opened, watched)
    }

    #[tokio::test]
    async fn watch_restarts_only_with_new_tenure() {
        let (opened, mut watched) = watched(0);
        let first = tenure(1);
        for (tenure, anew) in [
            (None, false),
            (Some(&first), true),
            // Doubt, and the lead that was kept.
            (Some(&first), false),
            (None, false),
            (Some(&first), false),
            (Some(&tenure(2)), true),
        ] {
            assert_eq!(watched.begins(tenure), anew, "{tenure:?}");
        }
        assert_eq!(opened.load(Ordering::Relaxed), 3);
        assert_eq!(watched.of(), Some(tenure(2).since));
    }

    #[tokio::test(start_paused = true)]
    async fn hanging_list_is_retried_but_not_quiet_watch() {
        let (opened, mut watched) = watched(2);
        let began = Instant::now();
        watched.begins(Some(&tenure(1)));
        while !matches!(watched.next().await, Some(Ok(Event::InitDone))) {}
        assert_eq!(opened.load(Ordering::Relaxed), 3);
        assert!(began.elapsed() >= SILENCE);
        assert!(watched.awaited.is_none(), "a watch may be quiet");
    }
}
