//! Injects faults according to a plan in the environment. Each failpoint strikes once, even across restarts,
//! because a file records it first.

use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::sync::{Mutex, OnceLock, PoisonError};

use kube::core::Status;
use rustix::process::{Signal, getpid, kill_process};

use super::MOMENTS;

/// Variable with the plan: `lease.renew:before=error,*:after=kill`. The first matching rule applies. A point
/// without a matching rule has no effect.
pub const PLAN: &str = "KRYPTON_FAILPOINT_PLAN";
/// Variable with the file that records the points that have struck, one per line.
pub const STRUCK: &str = "KRYPTON_FAILPOINT_STRUCK";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Strike {
    /// Same as `kill -9`.
    Kill,
    Error,
    /// Blocks the thread forever.
    Hang,
    Panic,
}

#[derive(Debug, PartialEq, Eq)]
struct Rules(Vec<(String, Strike)>);

impl Rules {
    fn read(text: &str) -> Result<Self, String> {
        let rule = |text: &str| match text.split_once('=') {
            Some((points, "kill")) => Ok((points.to_owned(), Strike::Kill)),
            Some((points, "error")) => Ok((points.to_owned(), Strike::Error)),
            Some((points, "hang")) => Ok((points.to_owned(), Strike::Hang)),
            Some((points, "panic")) => Ok((points.to_owned(), Strike::Panic)),
            _ => Err(format!(
                "{text:?} is not POINT=kill, POINT=error, POINT=hang or POINT=panic"
            )),
        };
        text.split(',')
            .map(rule)
            .collect::<Result<_, _>>()
            .map(Self)
    }

    fn of(&self, effect: &str, moment: &str) -> Option<Strike> {
        let fits = |points: &str| match points.split_once(':') {
            Some((name, at)) => at == moment && (name == "*" || name == effect),
            None => points == "*" || points == effect,
        };
        let rule = self.0.iter().find(|(points, _)| fits(points));
        rule.map(|(_, strike)| *strike)
    }
}

#[derive(Debug)]
struct Plan {
    rules: Rules,
    struck: Mutex<(BTreeSet<String>, File)>,
}

impl Plan {
    /// Returns the plan, which is read once. An invalid plan ends the test at startup.
    fn now() -> Option<&'static Self> {
        static PLAN_OF_THIS_PROCESS: OnceLock<Option<Plan>> = OnceLock::new();
        let plan = PLAN_OF_THIS_PROCESS.get_or_init(|| {
            let rules = Rules::read(&std::env::var(PLAN).ok()?);
            let path = std::env::var(STRUCK).unwrap_or_else(|_| panic!("{STRUCK} names no file"));
            let opened = || -> io::Result<(BTreeSet<String>, File)> {
                let file = OpenOptions::new().create(true).append(true).open(&path)?;
                let before = std::fs::read_to_string(&path)?;
                Ok((before.lines().map(str::to_owned).collect(), file))
            };
            let opened = opened().unwrap_or_else(|error| panic!("{STRUCK}, {path}: {error}"));
            Some(Self {
                rules: rules.unwrap_or_else(|problem| panic!("{PLAN}: {problem}")),
                struck: Mutex::new(opened),
            })
        });
        plan.as_ref()
    }

    fn first_time(&self, point: &str) -> bool {
        let mut struck = self.struck.lock().unwrap_or_else(PoisonError::into_inner);
        let first = struck.0.insert(point.to_owned());
        if first {
            let noted = writeln!(struck.1, "{point}");
            noted.unwrap_or_else(|error| panic!("{STRUCK}: {error}"));
        }
        first
    }
}

/// Returns the failpoint if the effect must fail here. Does not return if the process must exit.
fn fails(effect: &str, moment: &str) -> Option<String> {
    let plan = Plan::now()?;
    let strike = plan.rules.of(effect, moment)?;
    let point = format!("{effect}:{moment}");
    if !plan.first_time(&point) {
        return None;
    }
    match strike {
        Strike::Kill => {
            // No code of this process runs after this signal, not even a destructor.
            let killed = kill_process(getpid(), Signal::KILL);
            panic!("{point}: {killed:?}");
        }
        Strike::Hang => loop {
            std::thread::park();
        },
        Strike::Panic => panic!("{point}: injected by a test"),
        Strike::Error => {
            tracing::warn!(%point, "injecting a failure");
            Some(point)
        }
    }
}

/// An error type that can represent an injected fault.
pub trait Injected {
    /// The request was rejected, so nothing has changed.
    fn refused(point: String) -> Self;
    /// The request succeeded, but its response was lost.
    fn lost(point: String) -> Self;
}

impl Injected for kube::Error {
    fn refused(point: String) -> Self {
        let status = Status::failure(&format!("failpoint {point}"), "ServiceUnavailable");
        Self::Api(status.with_code(503).boxed())
    }

    fn lost(point: String) -> Self {
        Self::Service(Box::new(<io::Error as Injected>::lost(point)))
    }
}

impl Injected for io::Error {
    fn refused(point: String) -> Self {
        Self::other(format!("failpoint {point}"))
    }

    fn lost(point: String) -> Self {
        Self::new(io::ErrorKind::ConnectionReset, format!("failpoint {point}"))
    }
}

impl Injected for tonic::Status {
    fn refused(point: String) -> Self {
        Self::unavailable(format!("failpoint {point}"))
    }

    fn lost(point: String) -> Self {
        Self::unavailable(format!("failpoint {point}"))
    }
}

/// Implements [`crate::effect!`] for a call whose error implements [`Injected`].
pub async fn around<T, E: Injected>(
    effect: &'static str,
    call: impl Future<Output = Result<T, E>>,
) -> Result<T, E> {
    if let Some(point) = fails(effect, MOMENTS[0]) {
        return Err(E::refused(point));
    }
    let done = call.await?;
    fails(effect, MOMENTS[1]).map_or(Ok(done), |point| Err(E::lost(point)))
}

/// Implements [`crate::effect!`] with an error from the caller.
pub async fn around_or<T, E>(
    effect: &'static str,
    call: impl Future<Output = Result<T, E>>,
    failed: impl Fn(String) -> E,
) -> Result<T, E> {
    if let Some(point) = fails(effect, MOMENTS[0]) {
        return Err(failed(format!("failpoint {point}")));
    }
    let done = call.await?;
    fails(effect, MOMENTS[1]).map_or(Ok(done), |point| Err(failed(format!("failpoint {point}"))))
}

/// Implements [`crate::effect_now!`].
pub fn around_now<T, E: Injected>(
    effect: &'static str,
    call: impl FnOnce() -> Result<T, E>,
) -> Result<T, E> {
    if let Some(point) = fails(effect, MOMENTS[0]) {
        return Err(E::refused(point));
    }
    let done = call()?;
    fails(effect, MOMENTS[1]).map_or(Ok(done), |point| Err(E::lost(point)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_rule_that_fits_a_point_counts() {
        let rules = Rules::read("a.b:before=error,a.b=kill,*:after=error").unwrap();
        assert_eq!(rules.of("a.b", "before"), Some(Strike::Error));
        assert_eq!(rules.of("a.b", "after"), Some(Strike::Kill));
        assert_eq!(rules.of("c", "after"), Some(Strike::Error));
        assert_eq!(rules.of("c", "before"), None);
        for rubbish in ["", "a", "a=b", "a=kill,"] {
            assert!(Rules::read(rubbish).is_err(), "{rubbish:?}");
        }
    }
}
