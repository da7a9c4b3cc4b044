use std::future::pending;
use std::time::Duration;

use krypton_runtime::watchdog::Watchdog;

use super::*;

/// Longer than any step of a test takes.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Behaviour of a fake after it has listed its member.
#[derive(Clone, Copy, Debug)]
enum Behaviour {
    Good,
    Panics,
    Ends,
    NeverLists,
    /// Publishes this many different states of its member.
    Floods(u32),
    /// Finds objects by a reference.
    FollowsReferences,
}

/// A fake provider of one namespace with one member.
struct FakeProvider {
    namespace: &'static str,
    behaviour: Behaviour,
}

fn origin(namespace: &str) -> Origin {
    testkit::origin(namespace, "edge")
}

fn one_source(namespace: &str, uid: &str) -> BTreeMap<Origin, Arc<Source>> {
    let source = Source {
        uid: uid.to_owned(),
        ..testkit::source(origin(namespace), namespace)
    };
    [(source.origin.clone(), Arc::new(source))].into()
}

impl Provider for FakeProvider {
    fn describe(&self) -> String {
        format!("fake {}", self.namespace)
    }

    fn covers(&self, origin: &Origin) -> bool {
        origin.namespace.as_deref() == Some(self.namespace)
    }

    fn finds_unreferenced(&self) -> bool {
        !matches!(self.behaviour, Behaviour::FollowsReferences)
    }

    fn follow(self: Arc<Self>, handle: ProviderHandle) -> BoxFuture<'static, ()> {
        async move {
            if matches!(self.behaviour, Behaviour::NeverLists) {
                return pending().await;
            }
            let publish = |uid: &str| handle.publish(Some(one_source(self.namespace, uid)), None);
            publish("first");
            match self.behaviour {
                Behaviour::Panics => panic!("as it does"),
                Behaviour::Ends => return,
                Behaviour::Floods(times) => {
                    for time in 0..times {
                        publish(&format!("change {time}"));
                    }
                    publish("last");
                }
                Behaviour::Good | Behaviour::NeverLists | Behaviour::FollowsReferences => {}
            }
            // Lists a source with a rejected credential again.
            loop {
                let origin = handle.next_reread().await;
                let namespace = origin.namespace.unwrap_or_default();
                handle.publish(Some(one_source(&namespace, "again")), None);
            }
        }
        .boxed()
    }
}

fn fake(namespace: &'static str, behaviour: Behaviour) -> Arc<dyn Provider> {
    Arc::new(FakeProvider {
        namespace,
        behaviour,
    })
}

/// The UID of the member in a namespace, or `None` while it is unknown.
fn uid(sources: &Sources, namespace: &str) -> Option<String> {
    let running = sources
        .iter()
        .find(|running| running.provider.covers(&origin(namespace)))?;
    let sources = running.listing.sources.as_ref()?;
    Some(sources.get(&origin(namespace))?.uid.clone())
}

fn closed(sources: &Sources, namespace: &str) -> bool {
    sources
        .iter()
        .any(|running| running.provider.covers(&origin(namespace)) && running.listing.closed)
}

fn start_without_prefixes(
    providers: Vec<Arc<dyn Provider>>,
    stop: &CancellationToken,
) -> watch::Receiver<Sources> {
    start(providers, MemberPrefixes::new(), &Watchdog::default(), stop)
}

async fn wait_until(
    sources: &mut watch::Receiver<Sources>,
    condition: impl FnMut(&Sources) -> bool,
) -> Sources {
    let reached = tokio::time::timeout(TIMEOUT, sources.wait_for(condition));
    reached.await.expect("in time").expect("it runs").clone()
}

#[tokio::test]
async fn faulty_provider_keeps_sources_and_affects_no_other() {
    let stop = CancellationToken::new();
    let providers = vec![
        fake("panics", Behaviour::Panics),
        fake("ends", Behaviour::Ends),
        fake("hangs", Behaviour::NeverLists),
        fake("floods", Behaviour::Floods(10_000)),
        fake("good", Behaviour::Good),
    ];
    let mut sources = start_without_prefixes(providers, &stop);
    let current = wait_until(&mut sources, |sources| {
        closed(sources, "panics")
            && closed(sources, "ends")
            && uid(sources, "floods").as_deref() == Some("last")
            && uid(sources, "good").is_some()
    })
    .await;
    for namespace in ["panics", "ends", "good"] {
        assert_eq!(
            uid(&current, namespace).as_deref(),
            Some("first"),
            "{namespace}"
        );
    }
    assert_eq!(uid(&current, "hangs"), None);
    for namespace in ["hangs", "floods", "good"] {
        assert!(!closed(&current, namespace), "{namespace}");
    }

    // The other providers keep running.
    current.request_reread(&origin("good"));
    current.request_reread(&origin("panics"));
    wait_until(&mut sources, |sources| {
        uid(sources, "good").as_deref() == Some("again")
    })
    .await;
    assert_eq!(uid(&sources.get(), "panics").as_deref(), Some("first"));
    stop.cancel();
}

/// On one thread nothing reads between two changes: the slot holds the latest, and no queue grows.
#[tokio::test]
async fn flood_keeps_only_the_newest() {
    let stop = CancellationToken::new();
    let flooding = fake("floods", Behaviour::Floods(10_000));
    let mut sources = start_without_prefixes(vec![flooding], &stop);
    let mut observed = 0;
    wait_until(&mut sources, |sources| {
        observed += 1;
        uid(sources, "floods").as_deref() == Some("last")
    })
    .await;
    assert!(observed < 10, "{observed} of 10,000 changes were looked at");
    stop.cancel();
}

#[tokio::test]
async fn trouble_keeps_sources_and_clears_on_next_list() {
    let running = RunningProvider::new(fake("a", Behaviour::Good), Listing::default());
    let (all, sources) = watch::channel(Sources(vec![running]));
    let listing = || sources.get().0.swap_remove(0).listing;
    let handle = ProviderHandle {
        all,
        index: 0,
        rereads: Arc::default(),
        departures: Arc::default(),
    };
    handle.publish(None, Some("the watch failed".to_owned()));
    assert_eq!(listing().sources, None);
    handle.publish(Some(one_source("a", "first")), None);
    assert_eq!(listing().trouble, None);
    handle.publish(None, Some("the watch failed".to_owned()));
    assert!(listing().sources.is_some());
    handle.publish(
        Some(one_source("a", "next")),
        Some("half of it failed".to_owned()),
    );
    assert_eq!(listing().trouble.as_deref(), Some("half of it failed"));
    handle.publish(Some(one_source("a", "next")), None);
    assert_eq!(listing().trouble, None);
}

#[tokio::test]
async fn hub_shutdown_removes_no_source() {
    let stop = CancellationToken::new();
    let mut sources = start_without_prefixes(vec![fake("good", Behaviour::Good)], &stop);
    wait_until(&mut sources, |sources| uid(sources, "good").is_some()).await;
    stop.cancel();
    let ended = tokio::time::timeout(TIMEOUT, async { while sources.changed().await.is_ok() {} });
    ended.await.expect("in time");
    assert!(uid(&sources.get(), "good").is_some());
}

/// Counts the departures of one Secret after each step. Each step gives the listings of both providers, by
/// label and by name.
fn departures(steps: &[(Option<&str>, Option<&str>)]) -> Vec<usize> {
    let behaviours = [Behaviour::Good, Behaviour::FollowsReferences];
    let running =
        behaviours.map(|behaviour| RunningProvider::new(fake("a", behaviour), Listing::default()));
    let mut sources = Sources(running.into());
    let mut counts = Vec::new();
    for (by_label, by_name) in steps {
        for (running, uid) in sources.0.iter_mut().zip([by_label, by_name]) {
            let next = uid.map_or_else(BTreeMap::new, |uid| {
                let mut all = one_source("a", uid);
                if uid.is_empty() {
                    let source = Arc::make_mut(all.get_mut(&origin("a")).unwrap());
                    source.access = Err(Unresolved::new(reason::STARTING, String::new()));
                }
                all
            });
            running.departures.record(&running.listing, &next);
            running.listing.sources = Some(Arc::new(next));
        }
        counts.push(sources.take_departed().len());
    }
    counts
}

#[test]
fn source_that_another_provider_lists_has_not_departed() {
    let (here, none, unread) = (Some("u"), None, Some(""));
    // The KryptonDeployment that references the Secret is deleted and recreated.
    let steps = [(here, here), (here, none), (here, here)];
    assert_eq!(departures(&steps), [0, 0, 0]);
    // The Secret is not read yet, as after a restart.
    let steps = [(none, unread), (none, here), (none, unread), (none, here)];
    assert_eq!(departures(&steps), [0, 0, 0, 0]);
    // The label is removed and added again.
    let steps = [(here, here), (none, here), (none, here), (here, here)];
    assert_eq!(departures(&steps), [0, 0, 0, 1]);
    // No provider lists the source, in either order.
    assert_eq!(departures(&[(here, here), (none, none)]), [0, 1]);
    for steps in [(none, here), (here, none)].map(|step| [(here, here), step, (none, none)]) {
        assert_eq!(departures(&steps), [0, 0, 1]);
    }
    // The source is deleted and recreated.
    assert_eq!(departures(&[(here, here), (Some("v"), Some("v"))]), [0, 1]);
}

#[test]
fn object_recreated_during_failed_watch_has_not_departed() {
    let running = RunningProvider::new(fake("a", Behaviour::Good), Listing::default());
    let departures = Arc::clone(&running.departures);
    let (all, sources) = watch::channel(Sources(vec![running]));
    let handle = ProviderHandle {
        all,
        index: 0,
        rereads: Arc::default(),
        departures,
    };
    handle.publish(Some(one_source("a", "u")), None);
    handle.publish(None, Some("the watch failed".to_owned()));
    handle.publish(Some(one_source("a", "v")), None);
    assert!(sources.get().take_departed().is_empty());
    handle.publish(Some(one_source("a", "w")), None);
    assert_eq!(sources.get().take_departed().len(), 1);
}
