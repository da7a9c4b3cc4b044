//! While helm runs: what it waits for is said, as helm itself has it on record.

use std::pin::pin;

use kube::ResourceExt;

use super::{Done, Fault, Job, Performer, in_time};
use crate::progress::{PAUSE, QUIET, with_detail};
use crate::release;

impl Performer {
    /// Waits for a run of helm that writes `revision`, and says meanwhile which hook it waits for.
    pub(super) async fn telling<T>(
        &self,
        job: &Job,
        done: &mut Done,
        revision: u32,
        run: impl Future<Output = T>,
    ) -> T {
        let mut run = pin!(run);
        let mut pause = QUIET;
        loop {
            if let Ok(ended) = tokio::time::timeout(pause, &mut run).await {
                return ended;
            }
            pause = PAUSE;
            tokio::select! {
                biased;
                ended = &mut run => return ended,
                told = Box::pin(self.tell_hook(job, done, revision)) => {
                    // It is said the next time, or by the next look when helm has ended.
                    if let Err(fault) = told {
                        tracing::debug!(tenant = %job.key, problem = fault.text(), "progress not told");
                    }
                }
            }
        }
    }

    async fn tell_hook(&self, job: &Job, done: &mut Done, revision: u32) -> Result<(), Fault> {
        let secret = self.revision_secret(&job.release, revision).await?;
        let running = secret.and_then(|secret| release::running_hook(&secret).ok().flatten());
        let announced = &job.plan.state;
        let state = match running {
            Some(hook) => with_detail(announced, &format!("waiting for {hook}")),
            None => announced.clone(),
        };
        if done.said.as_ref() == Some(&state) {
            return Ok(());
        }
        let Err(fault) = self.say_state(job, &state, done).await else {
            return Ok(());
        };
        if matches!(fault, Fault::Stale) {
            // Somebody has written to the Tenant. Of another generation nothing was looked at yet.
            let api = self.tenants(&job.key);
            let fresh = in_time("reading the Tenant", api.get(&job.key.name)).await?;
            if fresh.uid() == job.tenant.uid()
                && fresh.metadata.generation == job.tenant.metadata.generation
            {
                done.tenant = Some(fresh);
            }
        }
        Err(fault)
    }
}
