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

use crate::credentials::enrollment::{EnrollError, answered, checked, ders, request};
use crate::credentials::store::{Identity, Kept, Store, new_key};
use crate::credentials::trusted_roots::{self, Told};
use crate::session::Link;
use crate::session::connect::Dialer;

const RENEWAL_RETRY_MAX: Duration = Duration::from_secs(600);
/// Longest sleep between two clock readings, because the clock can be set and the machine can be suspended.
const LOOK_EVERY: Duration = Duration::from_secs(600);
/// Without a session, how often the agent reads the Secret for a newer identity from another replica.
const READ_AGAIN_EVERY: Duration = Duration::from_secs(60);
const ROOTS_RETRY_MAX: Duration = Duration::from_secs(60);

/// Returns the renewal time of a certificate. It is at `part` (0 to 1) between 70 and 80 % of the lifetime, to spread
/// the renewals of agents that joined together.
pub fn renewal_time(not_before: Timestamp, not_after: Timestamp, part: f64) -> Timestamp {
    let life = not_after.duration_since(not_before);
    let share = 0.7 + 0.1 * part.clamp(0.0, 1.0);
    let lived = SignedDuration::from_secs((life.as_secs_f64() * share).round() as i64);
    not_before.checked_add(lived).unwrap_or(not_after)
}

/// Renews the certificate when it is due or the hub requests it, and stores the roots that the hub announces. Runs
/// until `stop`. The current session stays open, and the next connection uses the newest certificate and roots.
/// Publishes the expiry time in `expiry`.
pub async fn keep_renewed(
    store: Store,
    kept: Kept,
    dialer: Arc<Dialer>,
    link: watch::Receiver<Link>,
    expiry: watch::Sender<Timestamp>,
    stop: CancellationToken,
) {
    let mut told = dialer.trust().told();
    // The hub may have announced roots before this subscription.
    told.mark_changed();
    let keeper = Keeper {
        told,
        store,
        kept,
        dialer,
        link,
        expiry,
        times: Times::default(),
        part: chance::random(),
        roots: None,
        failures: 0,
    };
    stop.run_until_cancelled(keeper.run()).await;
}

/// Earliest times of the next attempts.
#[derive(Clone, Copy, Debug, Default)]
struct Times {
    /// When to store the roots that the hub announced.
    roots: Option<BootTime>,
    /// When to renew on request of the hub.
    asked: Option<BootTime>,
    /// No renewal before this time, after a failure.
    renewal: BootTime,
    /// No read of the stored identity before this time.
    look: BootTime,
}

/// Next step of the [`Keeper`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Chore {
    KeepRoots,
    Renew,
    /// Read the stored identity: another replica may have renewed it.
    ReadAgain,
    Rest(Duration),
}

impl Times {
    /// Returns the next step. `left` is the time until the certificate is due for renewal by age. Without a session
    /// (`up` is false), the agent can only read an identity that another replica stored.
    fn chore(&self, left: Duration, up: bool, now: BootTime) -> Chore {
        let until = |at: BootTime| at.since(now);
        if self.roots.is_some_and(|at| at <= now) {
            return Chore::KeepRoots;
        }
        let asked = self.asked.map_or(Duration::MAX, until);
        let renewal = left.min(asked).max(until(self.renewal));
        if up && renewal.is_zero() {
            return Chore::Renew;
        }
        if !up && self.look <= now {
            return Chore::ReadAgain;
        }
        let next = match up {
            true => renewal,
            false => until(self.look),
        };
        Chore::Rest(
            next.min(self.roots.map_or(LOOK_EVERY, until))
                .min(LOOK_EVERY),
        )
    }
}

/// Maintains the identity of one agent.
struct Keeper {
    store: Store,
    kept: Kept,
    dialer: Arc<Dialer>,
    link: watch::Receiver<Link>,
    expiry: watch::Sender<Timestamp>,
    told: watch::Receiver<Option<Told>>,
    times: Times,
    /// Random position of the next renewal in its window, from 0 to 1.
    part: f64,
    /// Roots that the hub announced and the agent has not stored yet.
    roots: Option<Vec<CertificateDer<'static>>>,
    failures: u32,
}

impl Keeper {
    async fn run(mut self) {
        while let Some(enrolled) = &self.kept.identity.enrolled {
            let due = renewal_time(enrolled.not_before, enrolled.not_after, self.part);
            let left = due.duration_since(clock::wall()).try_into();
            let left = left.unwrap_or(Duration::ZERO);
            let up = self.link.see().is_up();
            match self.times.chore(left, up, BootTime::now()) {
                // Boxed because these futures are large and rarely run; they would enlarge every idle agent.
                Chore::KeepRoots => Box::pin(self.keep_roots()).await,
                Chore::Renew => Box::pin(self.renew()).await,
                Chore::ReadAgain => Box::pin(self.read_again()).await,
                Chore::Rest(pause) => tokio::select! {
                    Ok(()) = self.told.changed() => self.hear(),
                    Ok(()) = self.link.changed() => {}
                    () = tokio::time::sleep(pause) => {}
                },
            }
        }
    }

    /// Takes over the latest announcement of the hub.
    fn hear(&mut self) {
        let Some(told) = self.told.see() else {
            return;
        };
        let now = BootTime::now();
        self.times.asked = told.renew_within.map(|within| {
            let at = BootTime(now.0 + within.mul_f64(chance::random()));
            // A repeated request must not postpone the renewal.
            self.times.asked.map_or(at, |before| before.min(at))
        });
        self.times.roots = Some(now);
        self.roots = Some(told.roots);
        self.failures = 0;
    }

    async fn keep_roots(&mut self) {
        self.times.roots = None;
        let Some(roots) = self.roots.clone() else {
            return;
        };
        let kept = keep_roots(&self.store, &self.kept, roots).await;
        match kept.and_then(|next| self.adopt(next)) {
            Ok(_) => {
                self.roots = None;
                self.failures = 0;
            }
            // Retry also errors that the user must fix, such as a missing permission: the hub announces its roots only
            // once.
            Err(error) if !matches!(error, EnrollError::Roots(_) | EnrollError::Tls(_)) => {
                self.times.roots = Some(self.after_failure(ROOTS_RETRY_MAX));
                tracing::warn!(error = %chain(&error), "storing the hub's roots failed; retrying");
            }
            Err(error) => {
                self.roots = None;
                tracing::error!(error = %chain(&error), "the hub's CA is not followed");
            }
        }
    }

    async fn renew(&mut self) {
        let renewed = renew(&self.store, &self.kept, &mut self.link).await;
        match renewed.and_then(|next| self.adopt(next)) {
            Ok(not_after) => {
                tracing::info!(%not_after, "the certificate was renewed");
                self.times.asked = None;
                self.failures = 0;
                self.part = chance::random();
            }
            Err(error) => {
                self.times.renewal = self.after_failure(RENEWAL_RETRY_MAX);
                let not_after = self.expiry.get();
                tracing::warn!(%not_after, error = %chain(&error), "renewing the certificate failed; retrying");
            }
        }
    }

    /// Returns the time of the next attempt.
    fn after_failure(&mut self, retry_max: Duration) -> BootTime {
        self.failures += 1;
        BootTime(BootTime::now().0 + backoff(self.failures, retry_max, chance::random()))
    }

    async fn read_again(&mut self) {
        let pause = READ_AGAIN_EVERY.mul_f64(0.5 + chance::random::<f64>() / 2.0);
        self.times.look = BootTime(BootTime::now().0 + pause);
        let stored = match self.store.read().await {
            Ok(Some(stored)) => stored,
            Ok(None) => return,
            Err(error) => {
                tracing::debug!(error = %chain(&error), "failed to read the identity again");
                return;
            }
        };
        let newer = expires(&stored) >= expires(&self.kept);
        if !newer || stored.identity.enrolled == self.kept.identity.enrolled {
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
    fn adopt(&mut self, next: Kept) -> Result<Timestamp, EnrollError> {
        let Some(enrolled) = &next.identity.enrolled else {
            return Err(EnrollError::Gone);
        };
        let config = enrolled
            .client_config(&next.identity.key)
            .map_err(EnrollError::Tls)?;
        let before = self.kept.identity.enrolled.as_ref();
        match before.is_some_and(|before| before.certificates == enrolled.certificates) {
            true => self.dialer.replace(config),
            false => self.dialer.renew(config),
        }
        self.dialer.trust().keep(&enrolled.roots);
        let not_after = enrolled.not_after;
        self.expiry.send_replace(not_after);
        self.kept = next;
        Ok(not_after)
    }
}

fn expires(kept: &Kept) -> Option<Timestamp> {
    kept.identity.enrolled.as_ref().map(|own| own.not_after)
}

/// Stores the roots that the hub announced. Keeps a newer certificate from another replica.
async fn keep_roots(
    store: &Store,
    ours: &Kept,
    roots: Vec<CertificateDer<'static>>,
) -> Result<Kept, EnrollError> {
    let trusted = ours.identity.enrolled.as_ref().ok_or(EnrollError::Gone)?;
    trusted_roots::check(&trusted.roots, &roots).map_err(EnrollError::Roots)?;
    let stored = store.read().await.map_err(EnrollError::Keep)?;
    let stored = stored.ok_or(EnrollError::Gone)?;
    let mut identity = match expires(&stored) >= expires(ours) {
        true => stored.identity.clone(),
        false => ours.identity.clone(),
    };
    let enrolled = identity.enrolled.as_mut().ok_or(EnrollError::Gone)?;
    enrolled.roots = roots;
    // Never store an identity that TLS rejects.
    enrolled
        .client_config(&identity.key)
        .map_err(EnrollError::Tls)?;
    if identity.enrolled == stored.identity.enrolled {
        return Ok(stored);
    }
    let wanted = identity.enrolled.clone();
    let kept = store.keep(stored, identity).await;
    let kept = kept.map_err(EnrollError::Keep)?;
    match kept.identity.enrolled == wanted {
        true => Ok(kept),
        false => Err(EnrollError::Overtaken),
    }
}

/// Stores and returns a new key with a new certificate, or returns a newer identity from another replica.
pub async fn renew(
    store: &Store,
    ours: &Kept,
    link: &mut watch::Receiver<Link>,
) -> Result<Kept, EnrollError> {
    let stored = store.read().await.map_err(EnrollError::Keep)?;
    let base = match stored {
        Some(stored) if expires(&stored) > expires(ours) => return Ok(stored),
        Some(stored) => stored,
        None => return Err(EnrollError::Gone),
    };
    let Some(enrolled) = &base.identity.enrolled else {
        return Err(EnrollError::Gone);
    };
    let membership = enrolled.membership();
    let trusted = ours.identity.enrolled.as_ref().unwrap_or(enrolled);
    // The session logs the reason if it is down.
    drop(tokio::time::timeout(LOOK_EVERY, link.wait_for(Link::is_up)).await);
    let connection = link.see().connection().cloned();
    let connection = connection.ok_or(EnrollError::NoSession)?;
    let key = new_key().map_err(EnrollError::Keep)?;
    let message = RenewRequest {
        certificate_request: request(&key)?.into(),
    };
    let mut client = connection.fleet();
    let asked = client.renew(message);
    let answer = answered(&connection, &membership.cluster, asked).await?;
    let (certificates, roots) = (ders(answer.certificates), ders(answer.roots));
    trusted_roots::check(&trusted.roots, &roots).map_err(EnrollError::Roots)?;
    let enrolled = checked(&connection, &key, membership, certificates, roots)?;
    let identity = Identity {
        key,
        enrolled: Some(enrolled),
    };
    let wanted = identity.enrolled.clone();
    let kept = store.keep(base, identity).await;
    let kept = kept.map_err(EnrollError::Keep)?;
    // The Secret now holds another replica's write. It is either a renewal, or only new roots with the old certificate.
    match kept.identity.enrolled == wanted || expires(&kept) > expires(ours) {
        true => Ok(kept),
        false => Err(EnrollError::Overtaken),
    }
}

#[cfg(test)]
mod tests;
