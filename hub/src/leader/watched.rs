//! A watch on the home cluster that starts with a new list in each leader term. The data of a standby may be
//! stale, because it was disconnected or its watch hung without an error.

use std::fmt;
use std::time::Duration;

use futures::StreamExt as _;
use futures::stream::BoxStream;
use krypton_runtime::clock::BootTime;
use kube::runtime::watcher::{self, Event};
use tokio::time::{Instant, sleep_until};

use super::LeaderTerm;

/// Time without an event after which the list of a term is requested again. Doubles each time. Together with
/// the Lease's duration, it allows a second request within ten seconds of a takeover.
const SILENCE: Duration = Duration::from_secs(2);
/// Delay after a failure: the longest back-off of the watch itself.
const AFTER_FAILURE: Duration = Duration::from_secs(10);
const LONGEST: Duration = Duration::from_secs(60);

type Events<K> = BoxStream<'static, watcher::Result<Event<K>>>;

pub(crate) struct Watched<K> {
    open: Box<dyn Fn() -> Events<K> + Send>,
    events: Events<K>,
    /// Start of the term for which the watch was last opened.
    of: Option<BootTime>,
    /// Set while a list is outstanding: the deadline for its next event, and the timeout for each event.
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

    /// Opens the watch again if this is a new term, and returns whether it did. The caller must then ignore its
    /// data until the list is complete. An unconfirmed leader keeps its term, and a standby has none.
    pub(crate) fn begins(&mut self, tenure: Option<&LeaderTerm>) -> bool {
        let since = tenure.map(|tenure| tenure.since);
        if since.is_none() || since == self.of {
            return false;
        }
        self.of = since;
        self.anew();
        true
    }

    /// Returns the start of the term for which the watch was last opened.
    pub(crate) fn of(&self) -> Option<BootTime> {
        self.of
    }

    /// Drops the current watch and starts with a new list.
    pub(crate) fn anew(&mut self) {
        self.open_for(SILENCE);
    }

    fn open_for(&mut self, patience: Duration) {
        self.events = (self.open)();
        self.awaited = Some((Instant::now() + patience, patience));
    }

    /// Returns the next event. Cancel-safe.
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

    /// The first `hang` watches never complete their list. Each later one lists nothing and stays open.
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
            // The leader was unconfirmed and kept its Lease.
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
