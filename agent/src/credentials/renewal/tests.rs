use futures::FutureExt;
use krypton_types::root_digest::RootDigest;

use super::*;
use crate::credentials::identity::Enrolled;
use crate::credentials::store::tests::{new_identity, store_with, store_with_conflict};
use crate::fake_hub::{FakeAuthority, FakeHub, Validity};

fn identity(authority: &FakeAuthority) -> Identity {
    new_identity(authority, Validity::Now)
}

#[tokio::test]
async fn renewal_stores_and_uses_new_key() {
    let authority = Arc::new(FakeAuthority::new());
    let hub = FakeHub::start_signing(&authority, "edge-1").await;
    let old_identity = identity(&authority);
    let store = store_with(&old_identity).await;
    let current = store.read().await.unwrap().unwrap();
    let config = old_identity
        .enrolled
        .as_ref()
        .unwrap()
        .client_config(&old_identity.key);
    let dialer = Dialer::new(hub.addresses(), config.unwrap());
    let connection = dialer.connect().await.unwrap();
    let (_link, mut link) = watch::channel(Link::Up(connection));

    let renewed = renew(&store, &current, &mut link).await.unwrap();
    let key = renewed.identity.key.serialize_der();
    assert_ne!(key, old_identity.key.serialize_der());
    let stored = store.read().await.unwrap().unwrap();
    assert_eq!(stored.identity.key.serialize_der(), key);
    assert_eq!(stored.identity.enrolled, renewed.identity.enrolled);
    let config = renewed.identity.enrolled.unwrap();
    dialer.renew(config.client_config(&renewed.identity.key).unwrap());
    assert!(dialer.connect().await.is_ok());
}

#[tokio::test]
async fn certificate_renewed_by_other_replica_is_adopted() {
    let authority = FakeAuthority::new();
    let other_identity = identity(&authority);
    let store = store_with(&other_identity).await;
    let mut current = store.read().await.unwrap().unwrap();
    let mut older = identity(&authority);
    if let Some(enrolled) = &mut older.enrolled {
        enrolled.not_after = enrolled.not_before;
    }
    current.identity = older;
    let (_link, mut link) = watch::channel(Link::default());
    let adopted = renew(&store, &current, &mut link).await.unwrap();
    assert_eq!(adopted.identity.enrolled, other_identity.enrolled);
}

#[tokio::test]
async fn overtaken_renewal_succeeds_only_with_newer_certificate() {
    let authority = Arc::new(FakeAuthority::new());
    let hub = FakeHub::start_signing(&authority, "edge-1").await;
    let dialer = authority.dialer(hub.addresses(), Validity::Now);
    let connection = dialer.connect().await.unwrap();
    let (_link, mut link) = watch::channel(Link::Up(connection));
    let old_identity = new_identity(&authority, Validity::Past);

    // Another replica has stored new roots with the old certificate.
    let mut with_new_roots = old_identity.clone();
    let enrolled = with_new_roots.enrolled.as_mut().unwrap();
    enrolled.roots.extend(FakeAuthority::new().roots());
    let store = store_with_conflict(&old_identity, &with_new_roots).await;
    let current = store.read().await.unwrap().unwrap();
    let error = renew(&store, &current, &mut link).await.unwrap_err();
    assert!(matches!(error, EnrollError::Conflict), "{error:?}");
    let stored = store.read().await.unwrap().unwrap();
    assert_eq!(stored.identity.enrolled, with_new_roots.enrolled);
    // The next attempt has no conflict.
    let renewed = renew(&store, &current, &mut link).await.unwrap();
    assert!(expiry_of(&renewed) > expiry_of(&current));
    let stored = store.read().await.unwrap().unwrap();
    assert_eq!(stored.identity.enrolled, renewed.identity.enrolled);

    // Another replica has renewed.
    let other_identity = identity(&authority);
    let store = store_with_conflict(&old_identity, &other_identity).await;
    let current = store.read().await.unwrap().unwrap();
    let renewed = renew(&store, &current, &mut link).await.unwrap();
    assert_eq!(renewed.identity.enrolled, other_identity.enrolled);
}

/// A keeper of `identity`, with the other ends of its channels.
struct RunningRenewal {
    store: Store,
    dialer: Arc<Dialer>,
    link: watch::Sender<Link>,
    expiry: watch::Receiver<Timestamp>,
    _stop: tokio_util::sync::DropGuard,
}

async fn start_renewal(identity: &Identity, addresses: Vec<String>) -> RunningRenewal {
    let store = store_with(identity).await;
    let stored = store.read().await.unwrap().unwrap();
    start_renewal_with(stored, store, addresses)
}

fn start_renewal_with(
    stored: StoredIdentity,
    store: Store,
    addresses: Vec<String>,
) -> RunningRenewal {
    let enrolled = stored.identity.enrolled.as_ref().unwrap();
    let config = enrolled.client_config(&stored.identity.key).unwrap();
    let dialer = Arc::new(Dialer::new(addresses, config));
    let (link, link_rx) = watch::channel(Link::default());
    let (expiry_tx, expiry) = watch::channel(enrolled.not_after);
    let stop = CancellationToken::new();
    tokio::spawn(run_renewal(
        store.clone(),
        stored,
        Arc::clone(&dialer),
        link_rx,
        expiry_tx,
        stop.clone(),
    ));
    RunningRenewal {
        store,
        dialer,
        link,
        expiry,
        _stop: stop.drop_guard(),
    }
}

impl RunningRenewal {
    async fn stored(&self) -> Enrolled {
        let stored = self.store.read().await.unwrap().unwrap();
        stored.identity.enrolled.unwrap()
    }

    /// Announces `roots` as the hub does, and waits until the agent confirms them.
    async fn announce(&self, roots: &[CertificateDer<'static>], renew: Option<Duration>) {
        let expected = RootDigest::from_ders(roots);
        let mut stored_digests = self.dialer.root_updates().stored_digests();
        stored_digests.mark_unchanged();
        self.dialer.root_updates().announce(RootsAnnouncement {
            roots: roots.to_vec(),
            renew_within: renew,
        });
        stored_digests.changed().await.unwrap();
        assert_eq!(stored_digests.get(), Some(expected));
    }
}

#[tokio::test]
async fn announced_roots_are_stored_without_renewing_certificate() {
    let (old, new) = (FakeAuthority::new(), FakeAuthority::new());
    let old_identity = identity(&old);
    let hub = FakeHub::start_as(&old, new.hub(Validity::Now)).await;
    let renewal = start_renewal(&old_identity, hub.addresses()).await;
    let error = renewal.dialer.connect().await.unwrap_err();
    assert!(chain(&error).contains("another CA"), "{error:?}");

    let old_and_new = [old.roots(), new.roots()].concat();
    renewal.announce(&old_and_new, None).await;
    let enrolled = old_identity.enrolled.unwrap();
    let expected = Enrolled {
        roots: old_and_new,
        ..enrolled
    };
    assert_eq!(renewal.stored().await, expected);
    renewal.dialer.connect().await.unwrap();
    // New roots alone must not replace the current stream.
    assert!(renewal.dialer.renewed().now_or_never().is_none());

    // The old root is removed.
    renewal.announce(&new.roots(), None).await;
    assert_eq!(renewal.stored().await.roots, new.roots());
}

#[tokio::test]
async fn foreign_roots_change_nothing_on_member() {
    let old = FakeAuthority::new();
    let old_identity = identity(&old);
    let renewal = start_renewal(&old_identity, vec!["127.0.0.1:1".to_owned()]).await;
    renewal.dialer.root_updates().announce(RootsAnnouncement {
        roots: FakeAuthority::new().roots(),
        renew_within: None,
    });
    // The agent processed the later announcement, so it rejected the earlier one.
    renewal.announce(&old.roots(), None).await;
    assert_eq!(Some(renewal.stored().await), old_identity.enrolled);
}

#[tokio::test]
async fn certificate_is_renewed_early_on_hub_request() {
    let authority = Arc::new(FakeAuthority::new());
    let hub = FakeHub::start_signing(&authority, "edge-1").await;
    let old_identity = identity(&authority);
    let renewal = start_renewal(&old_identity, hub.addresses()).await;
    // The hub disconnects before the renewal is due. The agent renews when it is connected again.
    renewal
        .announce(&authority.roots(), Some(Duration::ZERO))
        .await;
    let connection = renewal.dialer.connect().await.unwrap();
    renewal.link.send_replace(Link::Up(connection));
    renewal.dialer.renewed().await;
    assert_ne!(Some(renewal.stored().await), old_identity.enrolled);
    assert_eq!(renewal.expiry.get(), renewal.stored().await.not_after);
}

#[tokio::test]
async fn renewal_by_other_replica_is_found_without_hub() {
    let authority = FakeAuthority::new();
    let (old_identity, other_identity) = (identity(&authority), identity(&authority));
    let store = store_with(&old_identity).await;
    let current = store.read().await.unwrap().unwrap();
    store
        .replace(current.clone(), other_identity)
        .await
        .unwrap();
    let renewal = start_renewal_with(current, store, vec!["127.0.0.1:1".to_owned()]);
    renewal.dialer.renewed().await;
    assert_ne!(Some(renewal.stored().await), old_identity.enrolled);
}

#[test]
fn next_chore_follows_from_due_times() {
    let at = |second| BootTime(Duration::from_secs(second));
    let (now, never, not_due) = (at(1000), DueTimes::default(), CLOCK_CHECK_INTERVAL * 2);
    let seconds = Duration::from_secs;
    let wait = |second| RenewalAction::Wait(seconds(second));
    let roots_due = |second| DueTimes {
        store_roots: Some(at(second)),
        ..never
    };
    let requested_renewal = |second| DueTimes {
        requested_renewal: Some(at(second)),
        ..never
    };
    let failed = |second| DueTimes {
        earliest_renewal: at(second),
        ..requested_renewal(second - 10)
    };
    let recently_read = DueTimes {
        earliest_read: at(1030),
        ..never
    };
    for (times, until_due, is_connected, expected) in [
        (
            never,
            not_due,
            true,
            RenewalAction::Wait(CLOCK_CHECK_INTERVAL),
        ),
        (never, seconds(5), true, wait(5)),
        (never, Duration::ZERO, true, RenewalAction::Renew),
        // Renewal needs a session. The read is not repeated immediately.
        (never, Duration::ZERO, false, RenewalAction::ReadStored),
        (recently_read, Duration::ZERO, false, wait(30)),
        (failed(1007), Duration::ZERO, true, wait(7)),
        (failed(1000), not_due, true, RenewalAction::Renew),
        (requested_renewal(1020), not_due, true, wait(20)),
        (requested_renewal(999), not_due, true, RenewalAction::Renew),
        // Roots come first, because they verify the renewed certificate.
        (
            roots_due(1000),
            Duration::ZERO,
            true,
            RenewalAction::StoreRoots,
        ),
        (roots_due(1003), not_due, true, wait(3)),
        (roots_due(1003), Duration::ZERO, true, RenewalAction::Renew),
    ] {
        assert_eq!(
            times.next_action(until_due, is_connected, now),
            expected,
            "{times:?} {until_due:?} {is_connected}"
        );
    }
}

#[test]
fn renewal_is_due_at_70_to_80_percent() {
    let at = |second| Timestamp::from_second(second).unwrap();
    assert_eq!(renewal_time(at(1000), at(2000), 0.0), at(1700));
    assert_eq!(renewal_time(at(1000), at(2000), 1.0), at(1800));
    assert_eq!(renewal_time(at(1000), at(1000), 0.5), at(1000));
}
