//! Renews the agent's certificate before it expires, and stores the roots that the hub announces.

use std::sync::Arc;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use krypton_proto::v1::RenewRequest;
use krypton_runtime::chance;
use krypton_runtime::clock::{self, BootTime};
use krypton_runtime::newest::{Newest as _, NewestSeen as _};
use krypton_runtime::retry::backoff;
use krypton_types::error_chain::chain;
use rustls::pki_types::CertificateDer;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::credentials::enrollment::{
    EnrollError, await_response, certificate_request, to_der, verify_enrollment,
};
use crate::credentials::identity::Identity;
use crate::credentials::store::{Store, StoredIdentity, new_key};
use crate::credentials::trusted_roots::{self, RootsAnnouncement};
use crate::session::Link;
use crate::session::connect::Dialer;

const RENEWAL_RETRY_MAX: Duration = Duration::from_secs(600);
/// Longest sleep between two clock readings, because the clock can be set and the machine can be suspended.
const CLOCK_CHECK_INTERVAL: Duration = Duration::from_secs(600);
/// Without a session, how often the agent reads the Secret for a newer identity from another replica.
const STORED_READ_INTERVAL: Duration = Duration::from_secs(60);
const ROOTS_RETRY_MAX: Duration = Duration::from_secs(60);

/// Returns the renewal time of a certificate. It is at `window_position` (0 to 1) between 70 and 80 % of the lifetime, to spread
/// the renewals of agents that joined together.
pub fn renewal_time(
    not_before: Timestamp,
    not_after: Timestamp,
    window_position: f64,
) -> Timestamp {
    let lifetime = not_after.duration_since(not_before);
    let fraction = 0.7 + 0.1 * window_position.clamp(0.0, 1.0);
    let elapsed = SignedDuration::from_secs((lifetime.as_secs_f64() * fraction).round() as i64);
    not_before.checked_add(elapsed).unwrap_or(not_after)
}

/// Renews the certificate when it is due or the hub requests it, and stores the roots that the hub announces. Runs
/// until `stop`. The current session stays open, and the next connection uses the newest certificate and roots.
/// Publishes the expiry time in `expiry`.
pub async fn run_renewal(
    store: Store,
    stored: StoredIdentity,
    dialer: Arc<Dialer>,
    link: watch::Receiver<Link>,
    expiry: watch::Sender<Timestamp>,
    stop: CancellationToken,
) {
    let mut announcements = dialer.root_updates().announcements();
    // The hub may have announced roots before this subscription.
    announcements.mark_changed();
    let renewer = CertificateRenewer {
        announcements,
        store,
        stored,
        dialer,
        link,
        expiry,
        times: DueTimes::default(),
        window_position: chance::random(),
        roots: None,
        failures: 0,
    };
    stop.run_until_cancelled(renewer.run()).await;
}

/// Earliest times of the next attempts.
#[derive(Clone, Copy, Debug, Default)]
struct DueTimes {
    /// When to store the roots that the hub announced.
    store_roots: Option<BootTime>,
    /// When to renew on request of the hub.
    requested_renewal: Option<BootTime>,
    /// No renewal before this time, after a failure.
    earliest_renewal: BootTime,
    /// No read of the stored identity before this time.
    earliest_read: BootTime,
}

/// Next step of the [`CertificateRenewer`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RenewalAction {
    StoreRoots,
    Renew,
    /// Read the stored identity: another replica may have renewed it.
    ReadStored,
    Wait(Duration),
}

impl DueTimes {
    /// Returns the next step. `until_due` is the time until the certificate is due for renewal by age. Without a session
    /// (`is_connected` is false), the agent can only read an identity that another replica stored.
    fn next_action(&self, until_due: Duration, is_connected: bool, now: BootTime) -> RenewalAction {
        let until = |at: BootTime| at.since(now);
        if self.store_roots.is_some_and(|at| at <= now) {
            return RenewalAction::StoreRoots;
        }
        let requested_renewal = self.requested_renewal.map_or(Duration::MAX, until);
        let renewal = until_due
            .min(requested_renewal)
            .max(until(self.earliest_renewal));
        if is_connected && renewal.is_zero() {
            return RenewalAction::Renew;
        }
        if !is_connected && self.earliest_read <= now {
            return RenewalAction::ReadStored;
        }
        let next = match is_connected {
            true => renewal,
            false => until(self.earliest_read),
        };
        RenewalAction::Wait(
            next.min(self.store_roots.map_or(CLOCK_CHECK_INTERVAL, until))
                .min(CLOCK_CHECK_INTERVAL),
        )
    }
}

/// Maintains the identity of one agent.
struct CertificateRenewer {
    store: Store,
    stored: StoredIdentity,
    dialer: Arc<Dialer>,
    link: watch::Receiver<Link>,
    expiry: watch::Sender<Timestamp>,
    announcements: watch::Receiver<Option<RootsAnnouncement>>,
    times: DueTimes,
    /// Random position of the next renewal in its window, from 0 to 1.
    window_position: f64,
    /// Roots that the hub announced and the agent has not stored yet.
    roots: Option<Vec<CertificateDer<'static>>>,
    failures: u32,
}

impl CertificateRenewer {
    async fn run(mut self) {
        while let Some(enrolled) = &self.stored.identity.enrolled {
            let due = renewal_time(
                enrolled.not_before,
                enrolled.not_after,
                self.window_position,
            );
            let until_due = due.duration_since(clock::wall()).try_into();
            let until_due = until_due.unwrap_or(Duration::ZERO);
            let is_connected = self.link.get_and_update().is_up();
            match self
                .times
                .next_action(until_due, is_connected, BootTime::now())
            {
                // Boxed because these futures are large and rarely run; they would enlarge every idle agent.
                RenewalAction::StoreRoots => Box::pin(self.store_roots()).await,
                RenewalAction::Renew => Box::pin(self.renew()).await,
                RenewalAction::ReadStored => Box::pin(self.read_stored()).await,
                RenewalAction::Wait(pause) => tokio::select! {
                    Ok(()) = self.announcements.changed() => self.receive_announcement(),
                    Ok(()) = self.link.changed() => {}
                    () = tokio::time::sleep(pause) => {}
                },
            }
        }
    }

    /// Takes over the latest announcement of the hub.
    fn receive_announcement(&mut self) {
        let Some(announcement) = self.announcements.get_and_update() else {
            return;
        };
        let now = BootTime::now();
        self.times.requested_renewal = announcement.renew_within.map(|delay| {
            let due = now + delay.mul_f64(chance::random());
            // A repeated request must not postpone the renewal.
            self.times
                .requested_renewal
                .map_or(due, |previous| previous.min(due))
        });
        self.times.store_roots = Some(now);
        self.roots = Some(announcement.roots);
        self.failures = 0;
    }

    async fn store_roots(&mut self) {
        self.times.store_roots = None;
        let Some(roots) = self.roots.clone() else {
            return;
        };
        let result = store_roots(&self.store, &self.stored, roots).await;
        match result.and_then(|next| self.adopt(next)) {
            Ok(_) => {
                self.roots = None;
                self.failures = 0;
            }
            // Retry also errors that the user must fix, such as a missing permission: the hub announces its roots only
            // once.
            Err(error) if !matches!(error, EnrollError::Roots(_) | EnrollError::Tls(_)) => {
                self.times.store_roots = Some(self.after_failure(ROOTS_RETRY_MAX));
                tracing::warn!(error = %chain(&error), "storing the hub's roots failed; retrying");
            }
            Err(error) => {
                self.roots = None;
                tracing::error!(error = %chain(&error), "the hub's CA is not followed");
            }
        }
    }

    async fn renew(&mut self) {
        let renewed = renew(&self.store, &self.stored, &mut self.link).await;
        match renewed.and_then(|next| self.adopt(next)) {
            Ok(not_after) => {
                tracing::info!(%not_after, "the certificate was renewed");
                self.times.requested_renewal = None;
                self.failures = 0;
                self.window_position = chance::random();
            }
            Err(error) => {
                self.times.earliest_renewal = self.after_failure(RENEWAL_RETRY_MAX);
                let not_after = self.expiry.get();
                tracing::warn!(%not_after, error = %chain(&error), "renewing the certificate failed; retrying");
            }
        }
    }

    /// Returns the time of the next attempt.
    fn after_failure(&mut self, retry_max: Duration) -> BootTime {
        self.failures += 1;
        BootTime::now() + backoff(self.failures, retry_max, chance::random())
    }

    async fn read_stored(&mut self) {
        let pause = STORED_READ_INTERVAL.mul_f64(0.5 + chance::random::<f64>() / 2.0);
        self.times.earliest_read = BootTime::now() + pause;
        let stored = match self.store.read().await {
            Ok(Some(stored)) => stored,
            Ok(None) => return,
            Err(error) => {
                tracing::debug!(error = %chain(&error), "failed to read the identity again");
                return;
            }
        };
        let newer = expiry_of(&stored) >= expiry_of(&self.stored);
        if !newer || stored.identity.enrolled == self.stored.identity.enrolled {
            return;
        }
        match self.adopt(stored) {
            Ok(not_after) => {
                tracing::info!(%not_after, "using a newer identity from another replica");
            }
            Err(error) => {
                tracing::debug!(error = %chain(&error), "the identity from another replica is not usable");
            }
        }
    }

    /// Uses `next` for new connections. If the certificate is new, the session reconnects immediately. Returns its
    /// expiry.
    fn adopt(&mut self, next: StoredIdentity) -> Result<Timestamp, EnrollError> {
        let Some(enrolled) = &next.identity.enrolled else {
            return Err(EnrollError::Missing);
        };
        let config = enrolled.client_config(&next.identity.key)?;
        let previous = self.stored.identity.enrolled.as_ref();
        match previous.is_some_and(|previous| previous.certificates == enrolled.certificates) {
            true => self.dialer.replace(config),
            false => self.dialer.renew(config),
        }
        self.dialer.root_updates().publish_stored(&enrolled.roots);
        let not_after = enrolled.not_after;
        self.expiry.send_replace(not_after);
        self.stored = next;
        Ok(not_after)
    }
}

fn expiry_of(stored: &StoredIdentity) -> Option<Timestamp> {
    stored
        .identity
        .enrolled
        .as_ref()
        .map(|enrolled| enrolled.not_after)
}

/// Stores the roots that the hub announced. Keeps a newer certificate from another replica.
async fn store_roots(
    store: &Store,
    current: &StoredIdentity,
    roots: Vec<CertificateDer<'static>>,
) -> Result<StoredIdentity, EnrollError> {
    let trusted = current.identity.enrolled.as_ref();
    let trusted = trusted.ok_or(EnrollError::Missing)?;
    trusted_roots::check(&trusted.roots, &roots)?;
    let stored = store.read().await?.ok_or(EnrollError::Missing)?;
    let mut identity = match expiry_of(&stored) >= expiry_of(current) {
        true => stored.identity.clone(),
        false => current.identity.clone(),
    };
    let enrolled = identity.enrolled.as_mut().ok_or(EnrollError::Missing)?;
    enrolled.roots = roots;
    // Never store an identity that TLS rejects.
    enrolled.client_config(&identity.key)?;
    if identity.enrolled == stored.identity.enrolled {
        return Ok(stored);
    }
    let new_enrolled = identity.enrolled.clone();
    let replaced = store.replace(stored, identity).await?;
    match replaced.identity.enrolled == new_enrolled {
        true => Ok(replaced),
        false => Err(EnrollError::Conflict),
    }
}

/// Stores and returns a new key with a new certificate, or returns a newer identity from another replica.
pub async fn renew(
    store: &Store,
    current: &StoredIdentity,
    link: &mut watch::Receiver<Link>,
) -> Result<StoredIdentity, EnrollError> {
    let base = store.read().await?.ok_or(EnrollError::Missing)?;
    if expiry_of(&base) > expiry_of(current) {
        return Ok(base);
    }
    let enrolled = base.identity.enrolled.as_ref();
    let enrolled = enrolled.ok_or(EnrollError::Missing)?;
    let membership = enrolled.membership.clone();
    let trusted = current.identity.enrolled.as_ref().unwrap_or(enrolled);
    // The session logs the reason if it is down.
    drop(tokio::time::timeout(CLOCK_CHECK_INTERVAL, link.wait_for(Link::is_up)).await);
    let connection = link.get_and_update().connection().cloned();
    let connection = connection.ok_or(EnrollError::NoSession)?;
    let key = new_key()?;
    let message = RenewRequest {
        certificate_request: certificate_request(&key)?.into(),
    };
    let mut client = connection.fleet();
    let response_future = client.renew(message);
    let response = await_response(&connection, &membership.cluster, response_future).await?;
    let (certificates, roots) = (to_der(response.certificates), to_der(response.roots));
    trusted_roots::check(&trusted.roots, &roots)?;
    let enrolled = verify_enrollment(&connection, &key, membership, certificates, roots)?;
    let identity = Identity {
        key,
        enrolled: Some(enrolled),
    };
    let new_enrolled = identity.enrolled.clone();
    let replaced = store.replace(base, identity).await?;
    // The Secret now holds another replica's write. It is either a renewal, or only new roots with the old certificate.
    match replaced.identity.enrolled == new_enrolled || expiry_of(&replaced) > expiry_of(current) {
        true => Ok(replaced),
        false => Err(EnrollError::Conflict),
    }
}

#[cfg(test)]
mod tests;
