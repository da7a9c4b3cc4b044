//! Runs the soak test: bursts of faults, each followed by a quiet period and checks.

use std::{fs::File, io::Write, path::Path, sync::Arc, time::Duration};

use anyhow::{Context, Result, bail};
use futures::future::join_all;
use krypton_tests::{fleet::FleetClient, wait::eventually_within};
use kube::Client;
use tempfile::TempDir;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::{
    Args, carry,
    expected_state::ExpectedState,
    hubs::{self, VERSIONS},
    judgement::{self, ExpectedFleet, Violation},
    log_progress,
    person::{UserActions, repeat_lost_actions},
    plan::{Burst, FaultPlan, ScheduledFault},
    report::{Summary, load_average},
    snapshot::{self, EdgeSeen, Snapshot},
    stage::{REPLICAS, Stage, message},
    whom::Edge,
    witness::{watch_edge, watch_home},
};

/// Exceeds the duration of all repeated user actions.
const USER_ACTIONS_DEADLINE: Duration = Duration::from_secs(300);
const CHECK_INTERVAL: Duration = Duration::from_secs(2);
/// Deadline for the concurrent installation of all Tenants.
const INSTALL_DEADLINE: Duration = Duration::from_secs(300);
const INSTALL_DEADLINE_PER_TENANT: Duration = Duration::from_secs(10);
/// Interval between the first good check and the last check of a quiet period, during which nothing may change.
const RECHECK_DELAY: Duration = Duration::from_secs(5);

pub(crate) async fn run(args: &Args) -> Result<()> {
    let folder = TempDir::with_prefix("krypton-soak-").context("creating a folder for logs")?;
    let mut summary = Summary {
        seed: args.seed,
        tenants: args.tenants.into(),
        hubs: args.hubs.into(),
        settle: Duration::from_secs(args.settle),
        ..Summary::default()
    };
    let outcome = Box::pin(soak(args, folder.path(), &mut summary)).await;
    let text = summary.markdown();
    println!("{text}");
    if let Some(file) = &args.markdown {
        append(file, &text)?;
    }
    if outcome.is_err() || !summary.violations.is_empty() {
        log_progress(&format!("logs are kept in {}", folder.keep().display()));
    }
    outcome?;
    match summary.violations.len() {
        0 => Ok(()),
        count => bail!("seed {}: {count} violations", args.seed),
    }
}

fn append(file: &Path, text: &str) -> Result<()> {
    let write = || {
        let mut file = File::options().create(true).append(true).open(file)?;
        writeln!(file, "\n{}", text.trim_end())
    };
    write().with_context(|| format!("writing {}", file.display()))
}

async fn soak(args: &Args, logs: &Path, summary: &mut Summary) -> Result<()> {
    log_progress(&format!(
        "seed {}: starting three control planes, hubs ({}) and agent",
        args.seed, args.hubs
    ));
    let stage = Box::pin(Stage::start(args.hubs.into(), logs)).await?;
    let home = stage.home.client();
    let plan = FaultPlan::new(args.seed, args.tenants.into(), args.hubs.into());
    let expected_state = Arc::new(ExpectedState::new(ExpectedFleet {
        repository: stage.repository.url(),
        version: VERSIONS[0].to_owned(),
        message: message(0),
        replicas: REPLICAS,
        hubs: args.hubs.into(),
        ..ExpectedFleet::default()
    }));
    let _edge_watches =
        Edge::ALL.map(|edge| watch_edge(edge, &stage.site(edge).client, &expected_state));
    let _home_watch = watch_home(&home, &expected_state);
    let mut run = SoakRun {
        stage: &stage,
        home: &home,
        expected_state: &expected_state,
        summary,
        timeline: File::create(logs.join("timeline.txt")).context("creating the timeline")?,
        recovered_after: Duration::ZERO,
    };
    run.install_tenants(&plan).await?;
    let started = Instant::now();
    let end = started + Duration::from_secs(60 * args.minutes);
    for burst in plan {
        if Instant::now() >= end || !run.summary.violations.is_empty() {
            break;
        }
        let outcome = run.burst(&burst).await;
        run.summary.lasted = started.elapsed();
        // The logs are most useful after a failure.
        stage.save_logs().await?;
        run.summary.helm_runs = stage.helm_runs()?;
        outcome?;
        run.summary.epoch = FleetClient::new(&stage.home).hub_epoch().await?;
    }
    Ok(())
}

struct SoakRun<'a> {
    stage: &'a Stage,
    home: &'a Client,
    expected_state: &'a Arc<ExpectedState>,
    summary: &'a mut Summary,
    timeline: File,
    /// Time from the start of the last quiet period until the state was as expected.
    recovered_after: Duration,
}

impl SoakRun<'_> {
    fn users(&self) -> [UserActions<'_>; 2] {
        Edge::ALL
            .map(|edge| UserActions::new(self.stage.site(edge), self.home, self.expected_state))
    }

    /// Installs all Tenants before the first fault.
    async fn install_tenants(&mut self, plan: &FaultPlan) -> Result<()> {
        let tenants = plan.initial_tenants();
        let creating = tenants.iter().map(async |(tenant, workspace)| {
            let site = self.stage.site(tenant.edge());
            let user = UserActions::new(site, self.home, self.expected_state);
            user.create(*tenant, *workspace).await
        });
        for created in join_all(creating).await {
            created?;
        }
        let deadline = INSTALL_DEADLINE
            + INSTALL_DEADLINE_PER_TENANT * u32::try_from(tenants.len()).unwrap_or(u32::MAX);
        let started = Instant::now();
        let violations = self.wait_until_expected(started, deadline).await?;
        if let Some(violations) = violations {
            self.summary.violations = violations;
            bail!("the Tenants are not installed after {deadline:?}, before any fault");
        }
        log_progress(&format!(
            "{} Tenants are installed after {:.0} s",
            tenants.len(),
            started.elapsed().as_secs_f64()
        ));
        Ok(())
    }

    async fn burst(&mut self, burst: &Burst) -> Result<()> {
        let started = Instant::now();
        self.add_to_timeline(&format!("burst {} of {:?}", burst.number, burst.length));
        let injected = timeout(
            burst.length + USER_ACTIONS_DEADLINE,
            join_all(burst.steps.iter().map(|step| self.inject(step, started))),
        );
        let injected = injected
            .await
            .context("the faults of a burst did not end")?;
        for (step, (outcome, entry)) in burst.steps.iter().zip(injected) {
            let kind = step.fault.action.kind();
            *self.summary.faults.entry(kind).or_default() += 1;
            let outcome = match outcome {
                Ok(()) => String::new(),
                // The target was missing, or disappeared too early.
                Err(error) => {
                    self.summary.skipped += 1;
                    format!(": {error:#}")
                }
            };
            self.add_to_timeline(&format!("{entry}{outcome}"));
        }
        sleep_until(started + burst.length).await;
        let delay = started.elapsed().saturating_sub(burst.length);
        self.stage.end_faults()?;
        self.stage.check_running().await?;
        let faults_ended = Instant::now();
        self.stage.wait_for_clusters().await?;
        let recovery = faults_ended.elapsed().as_secs_f64();
        let repeated = repeat_lost_actions(self.users()).await?;
        self.add_to_timeline(&format!(
            "quiet; the clusters were ready after {recovery:.1} s; {repeated} user actions repeated"
        ));

        let quiet = Instant::now();
        let violations = self.wait_until_expected(quiet, self.summary.settle).await?;
        let recovery_time = self.recovered_after;
        self.summary.bursts += 1;
        let load = load_average();
        self.summary.load = self.summary.load.max(load);
        let result = match &violations {
            None => {
                self.summary.recovery_times.push(recovery_time);
                format!(
                    "all promises kept after {:.1} s of quiet",
                    recovery_time.as_secs_f64()
                )
            }
            Some(violations) => format!("{} violations", violations.len()),
        };
        let line = format!(
            "burst {}: {} faults in {} s (+{} s), {result}; {} live Tenants, load {load:.1}",
            burst.number,
            burst.steps.len(),
            burst.length.as_secs(),
            delay.as_secs(),
            self.expected_state.expected().tenants.len()
        );
        log_progress(&line);
        self.add_to_timeline(&line);
        if let Some(violations) = violations {
            for violation in &violations {
                let line = format!("  {}: {}", violation.promise, violation.details);
                log_progress(&line);
                self.add_to_timeline(&line);
            }
            self.summary.violations = violations;
        }
        Ok(())
    }

    async fn inject(&self, step: &ScheduledFault, started: Instant) -> (Result<()>, String) {
        sleep_until(started + step.at).await;
        let from = jiff::Timestamp::now();
        let injected = carry::carry_out(step.fault, self.stage, self.home, self.expected_state);
        let outcome = Box::pin(injected).await;
        let entry = format!("  {from} to {}: {:?}", jiff::Timestamp::now(), step.fault);
        (outcome, entry)
    }

    /// Checks until the state is as expected, and still is a little later. Returns the violations when the time is
    /// over.
    async fn wait_until_expected(
        &mut self,
        since: Instant,
        deadline: Duration,
    ) -> Result<Option<Vec<Violation>>> {
        loop {
            let snapshot = self.read().await;
            let is_late = since.elapsed() >= deadline;
            let watched = self.expected_state.violations();
            match snapshot {
                Ok(snapshot) => {
                    self.summary.checks += 1;
                    let mut violations =
                        judgement::find_violations(&self.expected_state.expected(), &snapshot);
                    violations.extend(watched.iter().cloned());
                    if violations.is_empty() {
                        self.recovered_after = since.elapsed();
                        return self.check_again().await;
                    }
                    if is_late || !watched.is_empty() {
                        return Ok(Some(violations));
                    }
                }
                Err(error) if is_late => return Err(error.context("the API servers don't respond")),
                Err(_) => {}
            }
            sleep(CHECK_INTERVAL).await;
        }
    }

    async fn check_again(&mut self) -> Result<Option<Vec<Violation>>> {
        sleep(RECHECK_DELAY).await;
        let snapshot = eventually_within("another check", USER_ACTIONS_DEADLINE, async || {
            self.read().await.map(Some)
        })
        .await?;
        self.summary.checks += 1;
        let mut violations = judgement::find_violations(&self.expected_state.expected(), &snapshot);
        violations.extend(self.expected_state.violations());
        Ok(Some(violations).filter(|violations| !violations.is_empty()))
    }

    async fn read(&self) -> Result<Snapshot> {
        let mut snapshot = Snapshot::default();
        for edge in Edge::ALL {
            let edge_state = EdgeSeen::read(&self.stage.site(edge).client).await?;
            snapshot.edges.insert(edge, edge_state);
        }
        snapshot::home(self.home, &mut snapshot).await?;
        snapshot.hubs = self.stage.hubs.leading().await;
        snapshot.holder = hubs::holder(self.home).await?;
        Ok(snapshot)
    }

    fn add_to_timeline(&mut self, line: &str) {
        // The timeline is for readers. Other writes report a full disk.
        writeln!(self.timeline, "{} {line}", jiff::Timestamp::now()).ok();
    }
}
