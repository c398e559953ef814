package org.apache.lucene.search.intervals;

import java.io.IOException;
import org.apache.lucene.search.DocIdSetIterator;

/** Declared so that the server links; the `intervals` query is not available in this jar. */
public abstract class IntervalIterator extends DocIdSetIterator {
    public static final int NO_MORE_INTERVALS = Integer.MAX_VALUE;

    public abstract int start();

    public abstract int end();

    public abstract int gaps();

    public abstract int nextInterval() throws IOException;

    public abstract float matchCost();
}
